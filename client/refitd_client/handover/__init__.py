"""Weights handed over from memory to memory, where trainer and engine share a GPU or a host (docs/adr/0007).

offer    what is offered, as plain data under a message authentication code: pure
secret   the key of that code, a file that the service makes
lent     the offer's file and its lock: how a trainer gets its tensors back
places   where tensors lie: shared memory of the host, or a GPU's by CUDA IPC
"""
