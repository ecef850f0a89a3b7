"""Reading a delta's file out of a folder that is held open: what it holds, and the changes themselves.

It is read and not mapped: one that gets shorter is an error then, and no SIGBUS that ends the service. How large it may
be follows from its base: no honest delta lists an element twice.
"""

from threading import Event

import numpy as np

from refitd.catalog.contents import ReadingStoppedError
from refitd.catalog.delta import Base, DeltaContents, DeltaRow
from refitd.catalog.opening import FileStat, Folder, check_unchanged
from refitd.catalog.reading import fill
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import Delta, DeltaRefusedError, parse_delta
from refitd_client.delta.change import Change
from refitd_client.delta.layout import MAX_HEADER_BYTES
from refitd_client.fingerprint import to_text
from refitd_client.finite import count_nonfinite

_CHUNK = 16 * 2**20


def read_changes(folder: Folder, file: FileStat, base: Base, *, stop: Event | None = None) -> Delta:
    """The delta in an open folder, whole: it takes as much memory as the file, and as its decoded indices.

    Raises:
        DeltaRefusedError: it breaks a rule of the format, or takes more memory than one on this base can.
        ChangedError: it is not the file that was listed.
        ReadingStoppedError: `stop` was set.
        OSError: it cannot be read.
    """
    if file.size > base.most_bytes + MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"it has {file.size} bytes, more than any delta on {base.id} can have")
    data = np.empty(file.size, np.uint8)
    with folder.open(DELTA_NAME, file) as fd:
        _fill(fd, data.data, stop)
        check_unchanged(DELTA_NAME, fd, file)
    return parse_delta(data.data, max_bytes=base.most_bytes)


def look_into(folder: Folder, file: FileStat, base: Base, *, stop: Event | None = None) -> DeltaContents:
    """What the delta in an open folder holds, as `refitd.catalog.delta` judges it; raises as `read_changes`."""
    try:
        delta = read_changes(folder, file, base, stop=stop)
    except DeltaRefusedError as error:
        return DeltaContents(rows={}, non_finite={}, fault=str(error))
    found = {name: _non_finite(change) for name, change in delta.changes.items()}
    return DeltaContents(
        base=delta.base,
        version=delta.version,
        rows={name: _row(change) for name, change in delta.changes.items()},
        non_finite={name: count for name, count in found.items() if count},
    )


def _fill(fd: int, data: memoryview, stop: Event | None) -> None:
    for begin in range(0, len(data), _CHUNK):
        if stop is not None and stop.is_set():
            raise ReadingStoppedError
        fill(fd, data[begin : begin + _CHUNK], begin)


def _row(change: Change) -> DeltaRow:
    return DeltaRow(
        dtype=change.dtype,
        shape=change.shape,
        changed=len(change.indices),
        base=to_text(change.base),
        result=to_text(change.result),
    )


def _non_finite(change: Change) -> int:
    return count_nonfinite(change.dtype, np.ascontiguousarray(change.values).view(np.uint8))
