"""What each rank does when it is asked to write: its parts of the tensors, into files that rank 0 has made."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.files import durable
from refitd_client.files.plain_file import open_plain
from refitd_client.sharded.boxes import Box, runs, whole
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Location, Part
from refitd_client.sharded.reading import Reader, flat_of
from refitd_client.tensors.source import entry_of, refused


class RankWriter:
    """Writes this rank's parts of one version into the files of a staging folder."""

    def __init__(
        self,
        files: Callable[[], Sequence[int]],
        locations: Mapping[str, Location],
        reader: Reader,
        *,
        check_finite: bool,
    ) -> None:
        """`files` gives the descriptors of the version's shards, by number, or raises OSError."""
        self._files = files
        self._locations = locations
        self._reader = reader
        self._check_finite = check_finite

    def write(self, holdings: Mapping[str, Holding], parts: Sequence[Part]) -> None:
        """Write the parts, tensor by tensor, in an order that all ranks share.

        A tensor that has to be redistributed is read by every rank of its mesh, also by one that has failed meanwhile,
        whatever its error: the others wait for it in a collective, and would wait for ever.

        Raises:
            InvalidWeightsError: a part holds a value that is not finite.
            OSError: the file system would not.
            RuntimeError: torch would not, as where a GPU has no memory for a cast.
        """
        mine: dict[str, list[Part]] = {}
        for part in parts:
            mine.setdefault(part.name, []).append(part)
        failure: Exception | None = None
        for name in sorted(self._locations.keys() & holdings.keys()):
            holding = holdings[name]
            own = [] if failure is not None else mine.get(name, [])
            if holding.target is None and not own:
                continue
            try:
                local = holding.local()
                for part in own:
                    self._write_part(holding, local, part)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _write_part(self, holding: Holding, local: Any, part: Part) -> None:
        claim = holding.claim
        box = claim.boxes[part.box]
        flat = _flat(local, claim.boxes, part.box)
        location, item = self._locations[claim.name], _item(holding)
        dtype = entry_of(claim.name, claim.dtype, claim.shape).dtype

        def use(first: int, data: NDArray[np.uint8]) -> int:
            if self._check_finite and any_nonfinite(dtype, data):
                return count_nonfinite(dtype, data)
            for run in runs(box, claim.shape, first, first + len(data) // item):
                piece = data[(run.begin - first) * item : (run.end - first) * item]
                durable.write_at(self._files()[location.file], piece.data, location.offset + run.at * item)
            return 0

        bad = self._reader.read(flat, part.begin, part.end, claim.dtype, use)
        if bad:
            raise refused(
                claim.name,
                f"holds {bad} values that are NaN or infinite in this rank's part: the training step that made it went "
                "wrong, and engines would answer with noise (check_finite=False publishes it all the same)",
            )


@contextmanager
def opening(folder: Path, names: Sequence[str]) -> Generator[Callable[[], list[int]], None, None]:
    """What opens the version's shards for writing, the first time that it is asked. Another rank has made them."""
    with ExitStack() as stack:
        yield cache(lambda: [_open(stack, folder / name, os.O_RDWR) for name in names])


def _open(stack: ExitStack, path: Path, flags: int) -> int:
    fd = open_plain(path, flags)
    stack.callback(os.close, fd)
    return fd


def _item(holding: Holding) -> int:
    claim = holding.claim
    nbytes, count = entry_of(claim.name, claim.dtype, claim.shape).nbytes, whole(claim.shape).count
    return nbytes // count


def _flat(local: Any, boxes: Sequence[Box], number: int) -> Any:
    """The elements of one of the boxes that a local tensor is made of, in order."""
    if len(boxes) == 1:
        return flat_of(local)
    shape = tuple(local.shape)
    for dim in range(len(shape)):
        sides = sorted({(box.start[dim], box.shape[dim]) for box in boxes})
        begin = sum(size for start, size in sides if start < boxes[number].start[dim])
        local = local.narrow(dim, begin, boxes[number].shape[dim])
    return flat_of(local)
