"""A version's files on the GPU, beside the model that is served: what was proved there is copied into the model from
there, at the speed of the GPU's memory and not of the bus.

One buffer, made for the first version that is staged and kept for the next ones, so that the engine's own memory is
asked for once. It is not written while anything refers to what lies in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import ref

import torch

_STAGED_ALIGNMENT = 512  # bytes: where tensors begin, as torch's own do
_FREE_SHARE = 0.5  # of the GPU's free memory: the engine needs some for long prompts


class StagingLease:
    """Keeps the buffer from being written again as long as it lives."""


@dataclass(frozen=True, slots=True)
class FileOnDevice:
    """One file on the GPU: the address of its first byte."""

    address: int
    lease: StagingLease


class StagingBuffer:
    """The buffer of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._lease: ref[StagingLease] | None = None

    def take(self, files: Mapping[str, tuple[int, int]]) -> dict[str, FileOnDevice] | None:
        """Room for files; None where the buffer is in use or the GPU has too little memory free.

        Args:
            files: by name, the size of each and the byte in it where its tensors begin.
        """
        if self._lease is not None and self._lease() is not None:
            return None
        places: dict[str, int] = {}
        end = 0
        for name, (size, begin) in files.items():
            places[name] = -(-(end + begin) // _STAGED_ALIGNMENT) * _STAGED_ALIGNMENT - begin
            end = places[name] + size
        memory = self._memory_of(end)
        if memory is None:
            return None
        lease = StagingLease()
        self._lease = ref(lease)
        return {name: FileOnDevice(memory.data_ptr() + place, lease) for name, place in places.items()}

    def _memory_of(self, size: int) -> torch.Tensor | None:
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            free, _ = torch.cuda.mem_get_info(self._device)
            if size > free * _FREE_SHARE:
                return None
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory
