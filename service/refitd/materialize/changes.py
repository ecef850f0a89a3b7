"""The deltas that are applied in one pass, open in their versions' folders, and what fingerprints they promise."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from refitd.materialize.trouble import MisfitError, SourceChangedError
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.header import BITS, Entry
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.delta import DeltaFile, DeltaRefusedError, check_fits
from refitd_client.fingerprint import to_text
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.examine import structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Deltas in their order. `expected` are the fingerprints of what they lead to, of as many tensors as they tell."""

    deltas: Sequence[DeltaFile]
    expected: Mapping[str, int]
    last: str

    def check(self, found: Mapping[str, int]) -> None:
        """Hold what came out against what was promised.

        Raises:
            MisfitError: a tensor is something else.
        """
        for name, value in self.expected.items():
            if found.get(name) != value:
                told = "not there" if name not in found else f"of fingerprint {to_text(found[name])}"
                raise MisfitError(
                    f"in {self.last} tensor {name} was to have fingerprint {to_text(value)}, and is {told}"
                )


@contextmanager
def open_batch(
    root: Path, batch: Sequence[VersionRecord], headers: Mapping[str, Header], stop: Event
) -> Generator[Changes]:
    """Open the deltas of some versions, for shards with these headers.

    Raises:
        SourceChangedError: they are not what was checked.
        MisfitError: the shards do not have the tensors that they change.
        ReadingStoppedError: `stop` was set.
        OSError: one cannot be read.
    """
    entries = _entries(headers)
    deltas: list[DeltaFile] = []
    expected: dict[str, int] = {}
    with ExitStack() as files:
        for record in batch:
            if stop.is_set():
                raise ReadingStoppedError
            delta, promised = files.enter_context(_opened(root, record))
            try:
                check_fits({name: (row.dtype, row.shape) for name, row in delta.head.rows.items()}, entries)
            except DeltaRefusedError as error:
                raise MisfitError(f"{record.id} does not fit: {error}") from error
            deltas.append(delta)
            expected |= {name: int(row.result, 16) for name, row in delta.head.rows.items()} | promised
        yield Changes(deltas=deltas, expected=expected, last=batch[-1].id)


@contextmanager
def _opened(root: Path, record: VersionRecord) -> Generator[tuple[DeltaFile, dict[str, int]]]:
    seen = structure(root, record.path)
    if seen.signature != record.signature or seen.manifest is None:
        raise SourceChangedError(f"the files of {record.id} are not those that were checked")
    try:
        with Folder(root, record.path) as folder, folder.open(DELTA_NAME, seen.files[DELTA_NAME]) as fd:
            delta = DeltaFile(fd)
            delta.check_digest()
            yield delta, {name: int(text, 16) for name, text in seen.manifest.fingerprints.items()}
    except (DeltaRefusedError, ChangedError, OpeningRefusedError) as error:
        raise SourceChangedError(f"the changes of {record.id} cannot be used any more: {error}") from error


def _entries(headers: Mapping[str, Header]) -> dict[str, Entry]:
    return {
        name: Entry(name=name, dtype=spec.dtype, shape=spec.shape)
        for header in headers.values()
        for name, spec in header.tensors.items()
        if spec.dtype in BITS
    }
