"""Fingerprints of torch tensors, and their NaN and infinite elements, where they are: on the GPU or in host memory.

No tensor leaves its device. Nothing is imported that the process does not have: a caller with a tensor has torch, and
one with a tensor on a GPU has a CUDA context.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import host

CASTS_BYTES = 2**28  # bytes of casts' results that are there at a time
_LAUNCH_BYTES = 2**30  # bytes of tensors that one launch reads: it takes 1/2048 of them beside the tensors


class ScanInput(NamedTuple):
    """A dense tensor, and its dtype's rule for NaN and infinity. `is_view`: it takes no memory of its own."""

    tensor: Any
    rule: Rule = NO_RULE
    is_view: bool = False


class Scan(NamedTuple):
    """A tensor's fingerprint, and how many elements are NaN or infinite by the given rule."""

    fingerprint: int
    nonfinite: int


def fingerprints(tensors: Iterable[Any]) -> list[int]:
    """The fingerprints of dense tensors, in their order. As `scan`."""
    return [found.fingerprint for found in scan(ScanInput(tensor) for tensor in tensors)]


def scan(inputs: Iterable[ScanInput]) -> list[Scan]:
    """Scan tensors. The results are in their order.

    Every byte is read once. Waits for the GPU once, however many tensors there are. A tensor is taken from `inputs`
    when it is its turn, and released soon.
    """
    return begin_scan(inputs)()


def begin_scan(inputs: Iterable[ScanInput]) -> Callable[[], list[Scan]]:
    """As `scan`. The function that is returned waits for the GPU. Call it before the tensors change."""
    found: dict[int, Scan] = {}
    sums: list[tuple[Sequence[int], Any]] = []
    for batch in _batches(inputs):
        for device in dict.fromkeys(bits.device for _, bits, _ in batch):
            here = [(number, bits, rule) for number, bits, rule in batch if bits.device == device]
            if device.type != "cpu":
                sums.append(([number for number, _, _ in here], _on_device([each[1:] for each in here])))
                continue
            for number, bits, rule in here:
                elements: host.Bits = bits.numpy().view(f"u{bits.element_size()}")
                found[number] = Scan(host.fingerprint(elements), _nonfinite(elements, rule))

    def results() -> list[Scan]:
        for numbers, out in sums:
            prints, bad = out.cpu().numpy().T.copy()
            for number, each, count in zip(numbers, prints.view(np.uint64).tolist(), bad.tolist(), strict=True):
                found[number] = Scan(each, count)
        return [found[number] for number in range(len(found))]

    return results


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def _batches(inputs: Iterable[ScanInput]) -> Iterator[list[tuple[int, Any, Rule]]]:
    """Numbered bits, of `_LAUNCH_BYTES` together or little more, and of `CASTS_BYTES` that take memory of their own."""
    from refitd_client.fingerprint import torch_ops

    batch: list[tuple[int, Any, Rule]] = []
    size = made = 0
    for number, (tensor, rule, is_view) in enumerate(inputs):
        bits: Any = torch_ops.flat_bits(tensor)
        batch.append((number, bits, rule))
        size += bits.nbytes
        made += 0 if is_view else bits.nbytes
        if size >= _LAUNCH_BYTES or made >= CASTS_BYTES:
            yield batch
            batch, size, made = [], 0, 0
    yield batch


def _nonfinite(elements: host.Bits, rule: Rule) -> int:
    mask, pattern = rule
    return 0 if rule == NO_RULE else int(np.count_nonzero((elements & elements.dtype.type(mask)) == pattern))


def _on_device(items: Sequence[tuple[Any, Rule]]) -> Any:
    """Two int64 for each tensor, on the device."""
    torch: Any = sys.modules["torch"]
    device = items[0][0].device
    out = torch.zeros((len(items), 2), dtype=torch.int64, device=device)
    if device.type == "cuda" and has_triton():
        from refitd_client.fingerprint import kernel
        from refitd_client.fingerprint.rows import Rows, grouped, whole_tensor

        for listed in grouped(whole_tensor(number, *item) for number, item in enumerate(items)):
            kernel.add_scan(Rows(listed, device), out)
    else:
        from refitd_client.fingerprint import torch_ops

        for number, (bits, rule) in enumerate(items):
            torch_ops.add_scan(bits, rule, out[number])
    return out
