"""Going through what a rank holds, part by part, in an order that all ranks share."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from refitd_client.checkpoint.finite import NO_RULE, rule_of
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import Scan, width_of
from refitd_client.fingerprint.tensors import PartInput
from refitd_client.sharded.holdings import Holding, flat_of
from refitd_client.sharded.layout import Box
from refitd_client.sharded.parts import SentPart
from refitd_client.write.plan import not_finite

Part = TypeVar("Part")


def each_part(
    holdings: Mapping[str, Holding],
    parts: Mapping[str, Sequence[Part]],
    do: Callable[[Holding, Any, Part], None],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Do something with each of this rank's parts, tensor by tensor.

    A tensor that has to be redistributed is read by every rank of its mesh, also by one that has failed meanwhile,
    whatever its error: the others wait for it in a collective, and would wait for ever.

    Args:
        holdings: this rank's tensors, by published name.
        parts: what is to be done of each, by name.
        do: called with the holding, its plain local tensor and the part.
        names: the tensors of the version, in the order in which all ranks go through them; None for all, by name.
    """
    failure: Exception | None = None
    for name in sorted(holdings) if names is None else names:
        if (holding := holdings.get(name)) is None:
            continue
        own = () if failure is not None else parts.get(name, ())
        if holding.target is None and not own:
            continue
        try:
            local = holding.local()
            for part in own:
                do(holding, local, part)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure


def lying(holding: Holding, part: SentPart) -> Any:
    """The elements of a part as a view of the trainer's tensor; None where they do not lie as they are published."""
    if holding.target is not None or str(holding.tensor.dtype) != f"torch.{holding.claim.dtype}":
        return None
    local = holding.local()
    flat = flat_box(local, holding.claim.boxes, part.part.box)
    if flat.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():
        return None
    return flat[part.part.begin : part.part.end]


def published(holding: Holding, local: Any, part: SentPart) -> Any:
    """The elements of a part in the published dtype: a view where they lie so.

    Args:
        holding: the tensor.
        local: this rank's part of it; None where that is to be looked up.
        part: which elements.
    """
    local = holding.local() if local is None else local
    flat = flat_box(local, holding.claim.boxes, part.part.box)[part.part.begin : part.part.end]
    return flat.to(getattr(sys.modules["torch"], holding.claim.dtype))


def part_input(part: SentPart, flat: Any, *, check_finite: bool) -> PartInput:
    """The elements of a part, as they are scanned.

    Args:
        part: which they are.
        flat: the elements, in the published dtype.
        check_finite: whether NaN and infinity count.
    """
    from refitd_client.fingerprint.device import INTEGERS

    width = width_of(part.entry.dtype)
    rule = rule_of(part.entry.dtype) if check_finite else NO_RULE
    return PartInput(flat.view(INTEGERS[width]), part.rows(width), rule)


def add_scans(found: dict[str, tuple[int, int]], parts: Sequence[SentPart], scans: Sequence[Scan]) -> None:
    """Add what parts add to each tensor's fingerprint, and how many of their elements are not finite, by name."""
    for each, scan in zip(parts, scans, strict=True):
        before, bad = found.get(each.entry.name, (0, 0))
        found[each.entry.name] = before + scan.fingerprint, bad + scan.nonfinite


def not_finite_here(name: str, count: int) -> InvalidWeightsError:
    """The error of a rank whose part of a tensor holds `count` values that are not finite."""
    return not_finite(name, count, " in this rank's part")


def flat_box(local: Any, boxes: Sequence[Box], number: int) -> Any:
    """The elements of one of the boxes that a local tensor is made of, in order."""
    if len(boxes) > 1:
        for dim in range(local.dim()):
            sides = sorted({(box.start[dim], box.shape[dim]) for box in boxes})
            begin = sum(size for start, size in sides if start < boxes[number].start[dim])
            local = local.narrow(dim, begin, boxes[number].shape[dim])
    return flat_of(local)
