"""Looking into a delta's file in a folder that is held open: what it holds, without the changes themselves.

The file is gone through in pieces, with a fixed amount of memory. It may have holes: its blocks on disk say nothing of
what it takes to read it, and compression, shared blocks and network file systems make honest files look as if they had
holes, too. So what counts is the size that it says, and that follows from its base: no delta lists an element twice.
"""

from functools import partial
from threading import Event

from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.checkpoint.opening import FileStat, Folder, check_unchanged
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import DeltaFile, DeltaRefusedError
from refitd_client.delta.layout import Row
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.delta import Base, DeltaContents, DeltaRow, fits


def look_into(folder: Folder, file: FileStat, base: Base, *, stop: Event | None = None) -> DeltaContents:
    """What the delta in an open folder holds, as `refitd_client.validation.delta` judges it.

    Its data is read only where its tensors are the base's. Its own digest is not looked at: the file is held against
    the one in its manifest as any other file.

    Raises:
        ChangedError: it is not the file that was listed.
        ReadingStoppedError: `stop` was set.
        OSError: it cannot be read.
    """
    with folder.open(DELTA_NAME, file) as fd:
        try:
            delta = DeltaFile(fd)
            rows = {name: _row(row) for name, row in delta.head.rows.items()}
            found = _nonfinite(delta, stop or Event()) if all(fits(*row, base) for row in rows.items()) else {}
        except DeltaRefusedError as error:
            return DeltaContents(rows={}, non_finite={}, fault=str(error))
        check_unchanged(DELTA_NAME, fd, file)
        return DeltaContents(base=delta.head.base, version=delta.head.version, rows=rows, non_finite=found)


def _nonfinite(delta: DeltaFile, stop: Event) -> dict[str, int]:
    """Go through all indices and values, several tensors at a time; how many values are NaN or infinite, by tensor."""
    found: dict[str, int] = {}

    def look(name: str, failed: Event) -> None:
        for _, values in delta.pieces(name):
            if stop.is_set():
                raise ReadingStoppedError
            if failed.is_set():
                return
            if any_nonfinite(dtype := delta.head.rows[name].dtype, bits := values.view("u1")):
                found[name] = found.get(name, 0) + count_nonfinite(dtype, bits)

    longest_first = sorted(delta.head.rows, key=lambda name: -delta.head.rows[name].changed)
    in_lanes([partial(look, name) for name in longest_first], lanes=lanes_for(len(longest_first)))
    return {name: found[name] for name in delta.head.rows if name in found}


def _row(row: Row) -> DeltaRow:
    return DeltaRow(dtype=row.dtype, shape=row.shape, changed=row.changed, base=row.base, result=row.result)
