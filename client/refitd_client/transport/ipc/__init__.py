"""Weights handed over from memory to memory, where trainer and engine share a GPU or a host (docs/adr/0008).

offer             what is offered, as plain data under a message authentication code: pure
offer_file        the offer's file and its lock, by which a trainer gets its tensors back; the key of that code
exporter          the lock that says whether the trainer lives
exported_memory   an offer of tensors as the trainer makes it, and as an engine sees it
shared            tensors in shared memory of the host; `device` in a GPU's, by CUDA IPC
"""
