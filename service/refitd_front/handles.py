"""Handles of GPU memory as vLLM's trainers send them."""

import msgspec


class Handles(msgspec.Struct, frozen=True):
    """Where tensors lie in another process's GPU memory."""


def read_handles(text: str, sizes: list[int] | None) -> Handles:
    """Read handles."""
    raise ValueError("ipc is not taken yet: use disk or nccl")
