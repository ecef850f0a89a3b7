"""What is found out about torch tensors where they are: on the GPU by the kernel, in host memory by numpy.

No tensor leaves its device. Nothing is imported that the process does not have: who passes a tensor has torch, and who
passes one on a GPU has a CUDA context.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import host

_MADE = 2**28  # bytes of casts' results that are there at a time
_BATCH = 2**30  # bytes of tensors that are looked at in one launch: it takes 1/2048 of them beside the tensors


class Look(NamedTuple):
    """A dense tensor, and its dtype's rule for NaN and infinity. It `is_view` if it was not made to be looked at."""

    tensor: Any
    rule: Rule = NO_RULE
    is_view: bool = False


class Scan(NamedTuple):
    """A tensor's fingerprint, and how many elements are NaN or infinite by the rule that was given."""

    fingerprint: int
    nonfinite: int


def fingerprints(tensors: Iterable[Any]) -> list[int]:
    """The fingerprints of dense tensors, in their order. As `scan`."""
    return [found.fingerprint for found in scan(Look(tensor) for tensor in tensors)]


def scan(looks: Iterable[Look]) -> list[Scan]:
    """Look at tensors. The results are in their order.

    Every byte is read once. Waits for the GPU once, however many tensors there are. Each tensor is taken when it is its
    turn, and let go of soon.
    """
    return begin_scan(looks)()


def begin_scan(looks: Iterable[Look]) -> Callable[[], list[Scan]]:
    """As `scan`. What is returned waits for the GPU, and must be called before the tensors change."""
    found: dict[int, Scan] = {}
    sums: list[tuple[Sequence[int], Any]] = []
    for batch in _batches(looks):
        for device in dict.fromkeys(bits.device for _, bits, _ in batch):
            here = [(number, bits, rule) for number, bits, rule in batch if bits.device == device]
            if device.type == "cpu":
                found |= {number: _on_host(bits, rule) for number, bits, rule in here}
            else:
                sums.append(([number for number, _, _ in here], _on_device([each[1:] for each in here])))
    return partial(_results, found, sums)


def _results(found: dict[int, Scan], sums: Sequence[tuple[Sequence[int], Any]]) -> list[Scan]:
    for numbers, out in sums:
        prints, bad = out.cpu().numpy().T.copy()
        for number, each, count in zip(numbers, prints.view(np.uint64).tolist(), bad.tolist(), strict=True):
            found[number] = Scan(each, count)
    return [found[number] for number in range(len(found))]


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return _is_installed("triton")


def _batches(looks: Iterable[Look]) -> Iterator[list[tuple[int, Any, Rule]]]:
    """Numbered bits, of `_BATCH` bytes together or little more, and of `_MADE` that take memory of their own."""
    from refitd_client.fingerprint import twin

    batch: list[tuple[int, Any, Rule]] = []
    size = made = 0
    for number, (tensor, rule, is_view) in enumerate(looks):
        bits: Any = twin.flat_bits(tensor)
        batch.append((number, bits, rule))
        size += bits.nbytes
        made += 0 if is_view else bits.nbytes
        if size >= _BATCH or made >= _MADE:
            yield batch
            batch, size, made = [], 0, 0
    yield batch


def _on_host(bits: Any, rule: Rule) -> Scan:
    array = bits.numpy()
    elements: host.Bits = array.view(f"u{array.itemsize}")
    mask, pattern = rule
    bad = 0 if rule == NO_RULE else int(np.count_nonzero((elements & elements.dtype.type(mask)) == pattern))
    return Scan(host.fingerprint(elements), bad)


def _on_device(items: Sequence[tuple[Any, Rule]]) -> Any:
    """Two int64 for each tensor, on the device."""
    torch: Any = sys.modules["torch"]
    device = items[0][0].device
    out = torch.zeros((len(items), 2), dtype=torch.int64, device=device)
    if device.type == "cuda" and has_triton():
        from refitd_client.fingerprint import kernel
        from refitd_client.fingerprint.rows import Rows, alike, whole

        for listed in alike(whole(number, *item) for number, item in enumerate(items)):
            kernel.add_scan(Rows(listed, device), out)
    else:
        from refitd_client.fingerprint import twin

        for number, (bits, rule) in enumerate(items):
            twin.add_scan(bits, rule, out[number])
    return out


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
