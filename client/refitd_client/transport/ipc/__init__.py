"""Weights handed over from memory to memory, where trainer and engine share a GPU or a host (docs/adr/0008).

offer             what is offered, as plain data under a message authentication code: pure
secret            the key of that code, a file that the service makes
offer_file        the offer's file and its lock, by which a trainer gets its tensors back
exporter          the lock that says whether the trainer lives
exported_memory   the trainer's side: an offer of its tensors
imported_memory   the engine's side: the tensors of an offer
handover          an offer under way: announced, answered, withdrawn, before the version's bytes are staged
shared            tensors in shared memory of the host; `device` in a GPU's, by CUDA IPC
"""
