"""Looking into a version's folder before anything of it is deleted: the shell around `holdings`.

Everything is read by handle, beneath the root, and no link is followed. What a look costs is bounded: so many names at
the folder's top, so many more in the folders that lie in it, and the header alone of each weight file.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from refitd.policy.holdings import FolderEntry, Holdings, is_weights, sort_out
from refitd.reclaim.seals import MAX_COUNTED, entries_of, room_within, seal_of
from refitd.reclaim.trash import examine
from refitd.root.handle import Identity, below, identity_of, parts_below
from refitd.root.outcome import Gone, Refused, sentence
from refitd_client.checkpoint.strict_header import HeaderRefusedError, TornFileError, read_header
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.files.plain_file import plain_file, read_at

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header


def look(root: int, path: str, known: Holdings | None = None) -> Holdings | Gone | Refused:
    """Say what lies in the folder at `path` and which of it refitd may delete. Changes nothing.

    `known` is what an earlier look said: where nothing has changed since, no file is opened again.
    """
    folder = examine(root, path)
    if not isinstance(folder, Identity):
        return folder
    try:
        with below(root, parts_below(path) or ("",)) as handle:
            if identity_of(os.fstat(handle)) != folder:
                return Refused(path, f"{path} was replaced while it was looked at: it is tried again the next time")
            return _look(handle, path, folder, known)
    except FileNotFoundError:
        return Gone(path)
    except OSError as error:
        return Refused(path, sentence(path, error))


def _look(folder: int, path: str, identity: Identity, known: Holdings | None) -> Holdings:
    entries = entries_of(folder)
    seal = seal_of(entries)
    if known is not None and (known.identity, known.seal) == (identity, seal):
        return known
    intact = [
        name for name, entry in entries.items() if entry.is_file and is_weights(name) and _is_intact(folder, name)
    ]
    mine, others = sort_out(path, entries, manifest=_manifest(folder, entries), intact=intact)
    left = [MAX_COUNTED]  # so many names are counted in the folders that lie in it
    inside = sum(room_within(folder, name, left) for name, entry in entries.items() if not entry.is_file)
    return Holdings(
        identity=identity,
        seal=seal,
        files={name: entries[name].stamp for name in mine},
        others=tuple(others),
        bytes=sum(entries[name].bytes for name in mine),
        foreign_bytes=sum(entries[name].bytes for name in others) + inside,
    )


def _manifest(folder: int, entries: Mapping[str, FolderEntry]) -> Manifest | None:
    entry = entries.get(MANIFEST_NAME)
    if entry is None or not entry.is_file:
        return None
    try:
        with _opened_file(folder, MANIFEST_NAME) as (handle, size):
            return parse_manifest(read_at(handle, size, 0)) if size <= MAX_MANIFEST_BYTES else None
    except (OSError, ManifestRefusedError):
        return None


def _is_intact(folder: int, name: str) -> bool:
    """Whether a weight file has the header of one. What follows the header may be cut off."""
    try:
        with _opened_file(folder, name) as (handle, size):
            try:
                read_header(handle, size)
            except TornFileError:
                length = int.from_bytes(read_at(handle, _LENGTH_BYTES, 0), "little")
                return _LENGTH_BYTES + length <= size
    except (OSError, HeaderRefusedError):
        return False
    return True


@contextmanager
def _opened_file(folder: int, name: str) -> Generator[tuple[int, int]]:
    with plain_file(name, within=folder) as handle:
        yield handle, os.fstat(handle).st_size
