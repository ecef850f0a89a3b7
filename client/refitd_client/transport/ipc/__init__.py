"""Weights handed over from memory to memory, where trainer and engine share a GPU or a host (docs/adr/0008).

offer       what is offered, as plain data under a message authentication code: pure
secret      the key of that code, a file that the service makes
offer_file  the offer's file and its lock: how a trainer gets its tensors back; `exporter` says whether it lives
making      an offer of a trainer's tensors; `taking` the tensors of an offer, as an engine sees them
handing     an offer under way: announced, answered, taken back; `exporting` while a version's bytes are staged
shared      tensors in shared memory of the host; `device` in a GPU's, by CUDA IPC
"""
