"""Reading a delta's file out of a folder that is held open: what it holds, and the changes themselves.

It is read and not mapped: one that gets shorter is an error then, and no SIGBUS that ends the service. How large it may
be follows from its base: no honest delta lists an element twice.
"""

from threading import Event

import numpy as np

from refitd.catalog.delta import Base, DeltaContents, DeltaRow
from refitd.catalog.opening import FileStat, Folder, check_unchanged
from refitd.catalog.whole_file import read_whole
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import Delta, DeltaRefusedError, parse_delta
from refitd_client.delta.change import Change
from refitd_client.delta.layout import MAX_HEADER_BYTES
from refitd_client.delta.nonfinite import nonfinite_in
from refitd_client.fingerprint import to_text


def read_changes(folder: Folder, file: FileStat, base: Base, *, stop: Event | None = None) -> Delta:
    """The delta in an open folder, whole: it takes as much memory as the file, and as its decoded indices.

    Raises:
        DeltaRefusedError: it breaks a rule of the format, or takes more memory than one on this base can.
        ChangedError: it is not the file that was listed.
        ReadingStoppedError: `stop` was set.
        OSError: it cannot be read.
    """
    data, _ = _read(folder, file, base, stop)
    return parse_delta(data, max_bytes=base.most_bytes)


def look_into(
    folder: Folder, file: FileStat, base: Base, said: str, *, stop: Event | None = None
) -> tuple[str | None, DeltaContents]:
    """What the delta in an open folder holds, as `refitd.catalog.delta` judges it, and the file's digest; None where it
    was too large to be read. Its own digest is not looked at where that is what its manifest `said`. Raises as
    `read_changes`, but for what breaks a rule.
    """
    digest: str | None = None
    try:
        data, digest = _read(folder, file, base, stop)
        delta = parse_delta(data, max_bytes=base.most_bytes, digested=digest == said)
    except DeltaRefusedError as error:
        return digest, DeltaContents(rows={}, non_finite={}, fault=str(error))
    rows = {name: _row(change) for name, change in delta.changes.items()}
    found = nonfinite_in(delta.changes)
    return digest, DeltaContents(base=delta.base, version=delta.version, rows=rows, non_finite=found)


def _read(folder: Folder, file: FileStat, base: Base, stop: Event | None) -> tuple[memoryview, str]:
    if file.size > base.most_bytes + MAX_HEADER_BYTES:
        raise DeltaRefusedError(f"it has {file.size} bytes, more than any delta on {base.id} can have")
    data = np.empty(file.size, np.uint8)
    with folder.open(DELTA_NAME, file) as fd:
        digest = read_whole(fd, data, stop=stop)
        check_unchanged(DELTA_NAME, fd, file)
    return data.data, digest


def _row(change: Change) -> DeltaRow:
    return DeltaRow(
        dtype=change.dtype,
        shape=change.shape,
        changed=len(change.indices),
        base=to_text(change.base),
        result=to_text(change.result),
    )
