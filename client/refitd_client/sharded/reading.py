"""Going through what a rank holds, part by part, in an order that all ranks share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from refitd_client.sharded.holdings import Holding, flat_of
from refitd_client.sharded.layout import Box

Part = TypeVar("Part")


def each_part(
    holdings: Mapping[str, Holding],
    parts: Mapping[str, Sequence[Part]],
    do: Callable[[Holding, Any, Part], None],
    *,
    names: frozenset[str] | None = None,
) -> None:
    """Do something with each of this rank's parts, tensor by tensor.

    A tensor that has to be redistributed is read by every rank of its mesh, also by one that has failed meanwhile,
    whatever its error: the others wait for it in a collective, and would wait for ever.

    Args:
        holdings: this rank's tensors, by published name.
        parts: what is to be done of each, by name.
        do: called with the holding, its plain local tensor and the part.
        names: the tensors of the version; None where that is all of them.
    """
    failure: Exception | None = None
    for name in sorted(holdings.keys() if names is None else names & holdings.keys()):
        holding = holdings[name]
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


def flat_box(local: Any, boxes: Sequence[Box], number: int) -> Any:
    """The elements of one of the boxes that a local tensor is made of, in order."""
    if len(boxes) > 1:
        for dim in range(local.dim()):
            sides = sorted({(box.start[dim], box.shape[dim]) for box in boxes})
            begin = sum(size for start, size in sides if start < boxes[number].start[dim])
            local = local.narrow(dim, begin, boxes[number].shape[dim])
    return flat_of(local)
