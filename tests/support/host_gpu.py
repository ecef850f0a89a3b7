"""Host memory in the place of a GPU, at the functions of the CUDA driver and of torch: what calls them is as it is.

Machines of CI have no GPU. Of a trainer: tensors in host memory count as a GPU's, and its copies are made by the
processor. Of an engine: memory that its plugin registers is host memory, the driver's copies are the processor's, and a
kernel's reading is the processors' arithmetic. Neither compares anything: all that decides is the product's own.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refitd_client import tensors as torch_tensors
from refitd_client.fingerprint.device import TensorPart, bits_at
from refitd_client.fingerprint.tensors import Scan, ScanInput, scan
from refitd_client.write import cuda
from refitd_plugin.memory import copy_schedule, driver
from refitd_plugin.proof import proving
from refitd_plugin.update import loading

HOST = torch.device("cpu")
_OURS, _LOADS = 7, 0  # streams: of a reader, and the current one of a load
_EMPTY = scan([ScanInput(torch.empty(0, dtype=torch.int16))])[0]


class Stream:
    """What was waited for."""

    waits = 0
    cuda_stream = _OURS

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None:
        Stream.waits += 1


def trainer_gpu(patch: pytest.MonkeyPatch) -> None:
    """Have tensors in host memory count as those of a GPU, but for integers of 32 bits."""
    event = SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", lambda **_: event)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda _: None)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch_tensors, "on_gpu", lambda tensor: tensor.dtype is not torch.int32)
    patch.setattr(cuda, "pinned", lambda count: torch.empty(count, dtype=torch.uint8))
    patch.setattr(cuda, "pin", lambda *_: 0)
    patch.setattr(cuda, "unpin", lambda *_: None)


def driver_copies(patch: pytest.MonkeyPatch) -> list[int]:
    """Have the trainer's copies made at once by address, as if there was a driver. The bytes of each are returned."""
    made: list[int] = []

    def copy(direction: str, target: int, source: int, count: int, stream: object) -> None:
        assert direction == "down"
        copy_rows(target, count, source, count, 1, stream)

    def copy_rows(target: int, pitch: int, source: int, width: int, rows: int, _: object) -> None:
        made.append(width * rows)
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * width, width)

    patch.setattr(cuda, "has_driver", lambda: True)
    patch.setattr(cuda, "copy", copy)
    patch.setattr(cuda, "copy_rows_down", copy_rows)
    return made


class HostGpu:
    """An engine's. What is ordered is done at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of the driver, and of what torch does with a GPU."""
        patch.setattr(driver, "_library", lambda: self)
        patch.setattr(driver, "pin", lambda *_: 0)
        patch.setattr(driver, "unpin", lambda *_: None)
        patch.setattr(copy_schedule, "_stream_of", lambda _: _LOADS)
        patch.setattr(proving, "AddressScan", self._scan_of)
        patch.setattr(proving, "has_triton", lambda: True)
        for module in (proving, loading):
            patch.setattr(module, "devices_of", lambda _: frozenset({HOST}))
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda _: nullcontext())
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, count: int, stream: int) -> int:  # noqa: N802
        """See the driver."""
        ctypes.memmove(target, source, count)
        return 0

    cuMemcpyDtoDAsync_v2 = cuMemcpyHtoDAsync_v2  # noqa: N815

    def cuMemcpy2DAsync_v2(self, move: Any, stream: int) -> int:  # noqa: N802
        """See the driver. Only loads have such moves."""
        assert stream == _LOADS
        rows = move._obj
        source = rows.srcHost or rows.srcDevice
        for row in range(rows.Height):
            at = rows.dstDevice + row * rows.dstPitch
            ctypes.memmove(at, source + row * rows.srcPitch, rows.WidthInBytes)
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: int, address: int) -> int:  # noqa: N802
        """See the driver. All memory is of the one GPU."""
        found._obj.value = 0
        return 0

    def _scan_of(self, parts: Sequence[TensorPart], count: int, *_: object) -> Any:
        """Stands for `AddressScan`."""

        def begin() -> Callable[[], list[Scan]]:
            found = [_EMPTY] * count
            for part in parts:
                if part.count:
                    bits = bits_at(part.now, part.count, part.width, HOST)
                    found[part.number] = scan([ScanInput(bits, part.rule, is_view=True)])[0]
            return lambda: found

        return SimpleNamespace(begin=begin)
