"""Checkpoint folders of trainers without refitd's SDK. Their names, and how those say that one is complete:

    weight_v000012/       slime, miles   complete when model.safetensors.index.json is there: it is written last
    step_12/              prime-rl       complete when the empty file STABLE is there
    checkpoint-12/FULL/   grail          complete when READY-* is there, in the folder above
    global_step12_hf/     openrlhf       no marker: as of transformers, whose save_pretrained writes it
    checkpoint-12/        transformers   no marker: complete when headers, index and files agree and nothing changes
    weight_update_v12/    areal          no marker in the folder; its name-resolve record is another matter

The number is the step; the folder around it is the run. The operator chooses which of them count (`--trainers`): a
trainer's output folder may hold checkpoints that were never meant for engines. Such a folder stays the trainer's own:
the trainer may write it again after a restart and delete it at any time; refitd deletes it only if that was asked for.

Such a trainer writes no `refit.json`. The service reads its folder and seals it. It then knows all that a manifest
says. It writes that down beside the root's records, where the ranks of engines find it, and never in the trainer's
folder:

    <root>/.refitd/manifests/<XXH3-128 of the path>.json    {"path": "run/checkpoint-10", "signature": …, "manifest": …}

It counts for the sealed files alone: those whose signature (names, sizes, times and inodes) stands in it.
"""

import errno
import os
import re
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from refitd_client.checkpoint.opening import ChangedError
from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import INDEX_NAME, MAX_STEP, SERVICE_FOLDER, parse_version_folder
from refitd_client.files.durable import make_folders, replace_file
from refitd_client.files.plain_file import open_folder, plain_file, read_at
from refitd_client.validation.validate import Structure


class Trainer(StrEnum):
    """The trainers whose folders refitd can look for, beside its own."""

    SLIME = "slime"
    MILES = "miles"
    PRIME_RL = "prime-rl"
    GRAIL = "grail"
    OPENRLHF = "openrlhf"
    TRANSFORMERS = "transformers"
    AREAL = "areal"


@dataclass(frozen=True, slots=True)
class Marker:
    """The file that a trainer writes last, as a pattern. `above`: it lies in the folder above the checkpoint's."""

    pattern: str
    writer: str
    above: bool = False

    def is_among(self, names: Collection[str]) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in names)

    @property
    def awaited(self) -> str:
        return f"{self.writer} writes {self.pattern} last, and it is not there yet (or announce the folder)"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """What the path of a trainer's own folder says. `marker` is None if no file says that it is complete."""

    run: str
    step: int
    marker: Marker | None


@dataclass(frozen=True, slots=True)
class _Convention:
    trainers: frozenset[Trainer]
    folder: re.Pattern[str]
    inner: str | None = None
    marker: Marker | None = None


_NUMBER = r"(0|[1-9]\d{0,12})"  # one name for each step: "step_007" is no name of prime-rl's
_CONVENTIONS = (
    _Convention(
        frozenset({Trainer.SLIME, Trainer.MILES}),
        re.compile(r"weight_v(\d{6}|[1-9]\d{6,12})"),
        marker=Marker(INDEX_NAME, "slime"),
    ),
    _Convention(frozenset({Trainer.PRIME_RL}), re.compile(rf"step_{_NUMBER}"), marker=Marker("STABLE", "prime-rl")),
    _Convention(
        frozenset({Trainer.GRAIL}),
        re.compile(rf"checkpoint-{_NUMBER}"),
        inner="FULL",
        marker=Marker("READY-*", "grail", above=True),
    ),
    _Convention(frozenset({Trainer.OPENRLHF}), re.compile(rf"global_step{_NUMBER}_hf")),
    _Convention(frozenset({Trainer.TRANSFORMERS}), re.compile(rf"checkpoint-{_NUMBER}")),
    _Convention(frozenset({Trainer.AREAL}), re.compile(rf"weight_update_v{_NUMBER}")),
)


def recognise(path: str, trainers: Collection[Trainer] = tuple(Trainer)) -> ForeignCheckpoint | None:
    """The run and step in the last parts of a path beneath the root; None if it is no folder of these trainers'."""
    parts = path.split("/")
    for convention in _CONVENTIONS:
        if convention.trainers.isdisjoint(trainers) or (convention.inner or parts[-1]) != parts[-1]:
            continue
        *run, name = parts if convention.inner is None else parts[:-1] or [""]
        match = convention.folder.fullmatch(name)
        if match is not None and run and int(match[1]) <= MAX_STEP:
            return ForeignCheckpoint("/".join(run), int(match[1]), convention.marker)
    return None


def inner_folders(path: str, trainers: Collection[Trainer]) -> list[str]:
    """The folders in which the checkpoint of a folder may lie: itself, or one of a fixed name in it."""
    inner = [f"{path}/{each.inner}" for each in _CONVENTIONS if each.inner is not None]
    return [each for each in (*inner, path) if recognise(each, trainers) is not None]


def holds_checkpoint(foreign: ForeignCheckpoint, names: Collection[str]) -> bool:
    """Whether the folder is one by its content: a part of a run's name may look like a checkpoint's folder."""
    marked = foreign.marker is not None and foreign.marker.is_among(names)
    return marked or any(name.endswith(".safetensors") for name in names)


def is_foreign(path: str) -> bool:
    """Whether a version's folder is its trainer's own: its name is not one that refitd gives."""
    return parse_version_folder(path.rpartition("/")[2]) is None


MANIFESTS = "manifests"
_MOST_BESIDE = 2**16  # bytes that path and signature may take


class _Kept(msgspec.Struct):
    path: str
    signature: str
    manifest: msgspec.Raw


def lacks_manifest(seen: Structure) -> bool:
    """Whether a folder is a full version without a manifest of its own: the service keeps one where it seals it."""
    return not seen.has_manifest and seen.adapter is None and bool(seen.headers)


def keep_manifest(root: Path, seen: Structure, manifest: Manifest) -> None:
    """Write down the manifest of a folder that has none. It is durable when this returns. Raises OSError if it cannot
    be written.
    """
    folder = root / SERVICE_FOLDER / MANIFESTS
    make_folders(folder)
    kept = _Kept(seen.path, seen.signature, msgspec.Raw(manifest.to_json()))
    replace_file(folder / _name(seen.path), msgspec.json.encode(kept), by=folder / f".{uuid4().hex}")


def sign_manifest(root: Path, path: str, signature: str) -> None:
    """Have a kept manifest count for the folder as it looks now: its files are other ones with the same bytes. Raises
    OSError if there is no such manifest, or it cannot be written.
    """
    kept = _read(root, path)
    folder = root / SERVICE_FOLDER / MANIFESTS
    kept.signature = signature
    replace_file(folder / _name(path), msgspec.json.encode(kept), by=folder / f".{uuid4().hex}")


def described(root: Path, seen: Structure) -> Structure:
    """What was seen of a folder, with the service's manifest where the folder has none and the service has sealed it.

    Raises:
        ChangedError: the files are not those that the service has sealed.
        OSError: the manifest cannot be read.
    """
    if seen.has_manifest or seen.faults:
        return seen
    try:
        kept = _read(root, seen.path)
        manifest = parse_manifest(bytes(kept.manifest))
    except FileNotFoundError:
        return seen
    except (msgspec.MsgspecError, ManifestRefusedError) as error:
        raise ChangedError(f"the service's manifest of {seen.path} does not parse: {error}") from error
    if (kept.path, kept.signature) != (seen.path, seen.signature):
        raise ChangedError(f"the files in {seen.path} are not those that the service has sealed")
    return replace(seen, manifest=manifest)


def kept_manifest(root: Path, path: str, signature: str) -> bytes:
    """The manifest that the service keeps of a folder, as it wrote it when it sealed files with this signature. Raises
    OSError if there is none, or none of these files.
    """
    try:
        kept = _read(root, path)
    except msgspec.MsgspecError as error:
        raise OSError(errno.EIO, f"the service's manifest of {path} does not parse: {error}") from error
    if (kept.path, kept.signature) != (path, signature):
        raise OSError(errno.ESTALE, f"the service's manifest of {path} is of other files")
    return bytes(kept.manifest)


def has_kept_manifest(root: Path, path: str) -> bool:
    return (root / SERVICE_FOLDER / MANIFESTS / _name(path)).is_file()


def forget_manifests(root: int, paths: Collection[str]) -> None:
    """Delete the manifests that the service keeps of other folders than `paths`, which are relative to the root. Raises
    OSError if one cannot be deleted.
    """
    wanted = {_name(path) for path in paths}
    with suppress(FileNotFoundError), _folder(root) as folder:
        for name in os.listdir(folder):
            if name not in wanted:  # also what a kill has left before the rename
                os.unlink(name, dir_fd=folder)


def _read(root: Path, path: str) -> _Kept:
    with _folder(root) as folder, plain_file(_name(path), within=folder) as fd:
        return from_json(read_at(fd, min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES + _MOST_BESIDE), 0), _Kept)


def _name(path: str) -> str:
    return f"{xxhash.xxh3_128_hexdigest(path.encode(errors='surrogateescape'))}.json"


@contextmanager
def _folder(root: Path | int) -> Generator[int]:
    """The folder of manifests, without following a link beneath the root."""
    top = open_folder(root, follow=True) if isinstance(root, Path) else os.dup(root)
    try:
        for part in (SERVICE_FOLDER, MANIFESTS):
            above, top = top, open_folder(part, within=top)
            os.close(above)
        yield top
    finally:
        os.close(top)
