"""Tensors as sources of bytes, whichever library they come from."""
