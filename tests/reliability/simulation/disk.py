"""A root in memory, behind the ports that the catalog and the sweep use; what trainers do to it, and what goes wrong.

What a folder looks like to the service was learnt from real checkpoints: one of each kind is written once, examined by
the product's own code, and copied from then on. So the verdicts are the product's, and only the disk is made up.
"""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, lru_cache
from hashlib import shake_128
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from refitd.catalog.files import Unreadable
from refitd.policy.holdings import Holdings
from refitd.root.handle import Identity
from refitd.root.scan import Discarded, Emptied, FoundFolder, Gone, Incoming, Listing, ListingFailed, Refused, Slot
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.manifest import Manifest, ManifestFile, digest_of_files, digest_of_pieces, joined
from refitd_client.contract.naming import MANIFEST_NAME, Order, parse_version_folder, version_id
from refitd_client.validation.base import Base
from refitd_client.validation.examine import ReadAgain, examine, structure
from refitd_client.validation.reference import read_reference
from refitd_client.validation.validate import Evidence, Options, Structure
from support.checkpoints import publish, tensors, write_model, write_shards
from support.deltas import chain, training

from . import proving
from .offer import SimOffer
from .proving import with_fingerprints

SIM_BLOCK = 64  # bytes that are pulled and digested together
Pause = Callable[[], Awaitable[None]]


class Make(StrEnum):
    """What a folder is worth. Only GOOD and PLAIN may ever reach an engine."""

    GOOD = "good"
    PLAIN = "plain"  # good, without a manifest
    MISSING = "missing"
    NAN = "nan"
    SHAPE = "shape"
    FLIPPED = "flipped"
    HALF = "half"  # no manifest, a shard is not there yet
    DELTA = "delta"  # good, for who has its base

    @property
    def is_good(self) -> bool:
        return self in {Make.GOOD, Make.PLAIN, Make.DELTA}

    @property
    def layout(self) -> str | None:
        """Which makes fit into each other's files; None for those that are nobody's slot."""
        return {Make.PLAIN: None, Make.HALF: None, Make.DELTA: None, Make.SHAPE: "b" * 32, Make.MISSING: "c" * 32}.get(
            self, "a" * 32
        )


@dataclass(slots=True)
class SimFolder:
    """A version's folder: `content` stands for the values of its tensors, `writes` counts changes to its files.

    A delta leads to `content` from the contents in `onto`; `base` is what its manifest says.
    """

    inode: int
    make: Make
    content: int
    writes: int = 0
    foreign: bool = False
    base: str | None = None
    onto: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Template:
    """What a folder looks like, and the bytes of its files."""

    structure: Structure
    evidence: Evidence
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@cache
def templates() -> tuple[Reference, dict[Make, _Template]]:
    """One real checkpoint of each make, as the product sees it, and the model that they are held against."""
    with TemporaryDirectory() as name:
        root = Path(name)
        reference, good = read_reference(write_model(root / "base")), tensors(1)
        makers: dict[Make, Callable[[str], Path]] = {
            Make.GOOD: lambda run: publish(root, run, 1, good),
            Make.PLAIN: lambda run: write_shards(root / run / "v000001", good),
            Make.MISSING: lambda run: publish(
                root, run, 1, {name: good[name] for name in good if name != "layer.3.weight"}
            ),
            Make.NAN: lambda run: publish(
                root, run, 1, good | {"layer.2.weight": good["layer.2.weight"] * np.float32("nan")}
            ),
            Make.SHAPE: lambda run: publish(root, run, 1, good | {"layer.0.weight": np.zeros((5, 3), np.float32)}),
            Make.FLIPPED: lambda run: _flip(publish(root, run, 1, good)),
            Make.HALF: lambda run: _halve(write_shards(root / run / "v000001", good)),
        }
        found: dict[Make, _Template] = {Make.DELTA: _delta(root / "deltas", reference)}
        for make, write in makers.items():
            write(make.value)
            path = f"{make.value}/v000001"
            seen = structure(root, path)
            evidence = examine(root, path, reference, Options())
            found[make] = _Template(seen, evidence, _files_in(root / path))
        return reference, found


def _files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME}


@lru_cache(4096)
def bytes_of(make: Make, name: str, content: int) -> bytes:
    """The bytes of a file of a version: others for other contents, in a safetensors file behind its header."""
    real = templates()[1][make].files[name]
    if name.endswith(".json"):
        return real
    head = 8 + int.from_bytes(real[:8], "little") if name.endswith(".safetensors") else 0
    return real[:head] + shake_128(f"{name} {content}".encode()).digest(len(real) - head)


def digest_in_blocks(data: bytes) -> str:
    """A file's digest, of blocks of `SIM_BLOCK`: files here are small, and are to have several."""
    return joined(blocks_of(data))


def blocks_of(data: bytes, size: int = SIM_BLOCK) -> list[bytes]:
    return [digest_of_pieces([data[start : start + size]]) for start in range(0, max(len(data), 1), size)]


@lru_cache(4096)
def _entry(make: Make, name: str, content: int) -> ManifestFile:
    data = bytes_of(make, name, content)
    return ManifestFile(size=len(data), digest=digest_in_blocks(data))


def _delta(root: Path, reference: Reference) -> _Template:
    """A delta as the publisher writes it. What is said of fingerprints is left out: contents are made up here."""
    with training(root) as trainer:
        full, record = chain(trainer, root, 2)
    base = Base(full.id, reference.inventory, {})
    evidence = examine(root, record.path, base, Options())
    assert evidence.structure is not None
    assert evidence.structure.manifest is not None
    look = replace(evidence.structure, manifest=replace(evidence.structure.manifest, fingerprints={}))
    assert evidence.delta is not None
    evidence = replace(evidence, structure=look, delta=replace(evidence.delta, rows={}))
    return _Template(look, evidence, _files_in(root / record.path))


def _flip(folder: Path) -> Path:
    shard = folder / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    return folder


def _halve(folder: Path) -> Path:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


class SimDisk:
    """What lies under the root, and what trainers offer there; `counts` what plugins have loaded, and put back.

    `fault` is raised by whatever reads; `hidden`: it is unmounted, and the service's own folder with it; `empty`: the
    listing, and only that, says that nothing is there.
    """

    def __init__(self) -> None:
        self.folders: dict[str, SimFolder] = {}
        self.trash: list[SimFolder] = []
        self.slots: dict[str, SimFolder] = {}
        self.backup: dict[str, SimFolder] = {}
        self.incoming: dict[str, bool] = {}  # what is being written, and whether its publisher lives
        self.copies: dict[str, SimFolder] = {}
        self.keeps_manifests = True
        self.described: dict[str, str] = {}  # the folders of which the service keeps a manifest, as they were signed
        self.offers: dict[str, SimOffer] = {}
        self.counts: Counter[str] = Counter()
        self.no_room = False
        self.fault: OSError | None = None
        self.hidden = False
        self.empty = False
        self.unreadable: set[str] = set()
        self._inodes = itertools.count(1)

    def put(self, path: str, make: Make, content: int, *, foreign: bool = False) -> SimFolder:
        folder = SimFolder(next(self._inodes), make, content, foreign=foreign)
        self.folders[path] = folder
        return folder

    def recycle(self, path: str, make: Make, content: int) -> SimFolder | None:
        """A publisher takes a slot that fits: the same files, whoever has them open, with other bytes."""
        for name, folder in self.slots.items():
            if folder.make.layout == make.layout:
                del self.slots[name]
                folder.make, folder.content, folder.writes = make, content, folder.writes + 1
                self.folders[path] = folder
                return folder
        return None

    def inode(self) -> int:
        return next(self._inodes)

    def any(self, path: str) -> SimFolder | None:
        return self.folders.get(path) or self.copies.get(path.rpartition("/")[2])

    def rewrite(self, path: str, make: Make, content: int) -> None:
        folder = self.folders[path]
        folder.make, folder.content, folder.writes = make, content, folder.writes + 1

    def remove(self, path: str) -> None:
        if (folder := self.folders.pop(path, None)) is not None:
            self.backup[path] = folder

    def restore(self, path: str) -> None:
        folder = self.folders.get(path) or self.backup[path]
        self.folders[path] = replace(folder, inode=next(self._inodes))

    def clear(self, *, whole: bool) -> None:
        """All runs are gone; where the `whole` root is, as after a reboot, so is what the service keeps in it."""
        self.folders.clear()
        self.offers.clear()
        self.incoming.clear()
        if whole:
            self.slots.clear()
            self.copies.clear()
            self.described.clear()
            self.trash.clear()

    def copied(self) -> dict[str, SimFolder]:
        return {path: replace(folder) for path, folder in self.folders.items()}

    def put_back(self, copied: Mapping[str, SimFolder]) -> None:
        """The whole root comes from a backup: other inodes, the same bytes."""
        self.clear(whole=True)
        for path, folder in copied.items():
            self.folders[path] = replace(folder, inode=next(self._inodes))

    def digest(self, path: str) -> str | None:
        manifest = seen_at(path, self.folders[path]).structure.manifest
        return None if manifest is None else manifest.digest

    def at(self, path: str) -> SimFolder:
        """The folder at a path, as any reader gets it. Raises OSError."""
        if self.fault is not None:
            raise self.fault
        if path in self.unreadable:
            raise OSError(5, "Input/output error", path)
        if self.hidden or path not in self.folders:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.folders[path]

    def listing(self) -> Listing | ListingFailed:
        if self.fault is not None or self.hidden:
            return ListingFailed(f"the root cannot be listed: {self.fault}")
        found: list[FoundFolder] = []
        for path in [] if self.empty else sorted(self.folders):
            run, _, name = path.rpartition("/")
            order = parse_version_folder(name)
            if order is not None:
                found.append(FoundFolder(run=run, order=order, path=path))
        return Listing(tuple(found), frozenset(each.run for each in found))


def signature_of(folder: SimFolder) -> str:
    return f"sim:{folder.inode}:{folder.writes}"


def _order(path: str) -> Order:
    order = parse_version_folder(path.rpartition("/")[2])
    return order if order is not None else Order(1, 0)


def seen_at(path: str, folder: SimFolder) -> _Template:
    template = templates()[1][folder.make]
    manifest, contents = template.structure.manifest, template.evidence.contents
    if manifest is not None:
        order = _order(path)
        files = {name: _entry(folder.make, name, folder.content) for name in manifest.files if name in template.files}
        manifest = replace(
            manifest, run=path.rpartition("/")[0], generation=order.generation, step=order.step, files=files
        )
        if folder.make is Make.DELTA:
            manifest = replace(manifest, base=folder.base)
        else:
            manifest = with_fingerprints(template.structure, manifest, folder.content)
    look = replace(template.structure, path=path, signature=signature_of(folder), manifest=manifest)
    if contents is not None:
        digests = {name: _digest(folder, name, digest) for name, digest in contents.digests.items()}
        contents = replace(contents, digests=digests)
    delta = template.evidence.delta
    if delta is not None and manifest is not None:
        delta = replace(delta, base=folder.base or "", version=version_id(manifest.run, manifest.order))
    return _Template(look, replace(template.evidence, structure=look, contents=contents, delta=delta))


def _digest(folder: SimFolder, name: str, found: str) -> str:
    """What reading a file finds, where the template's own bytes had the digest `found`."""
    template = templates()[1][folder.make]
    manifest = template.structure.manifest
    if manifest is not None and name in manifest.files and manifest.files[name].digest == found:
        return _entry(folder.make, name, folder.content).digest
    return f"{found}:{folder.content}"


class SimFiles:
    """The catalog's port."""

    def __init__(self, disk: SimDisk, pause: Pause) -> None:
        self._disk = disk
        self._pause = pause
        self.listed: Listing | ListingFailed | None = None

    async def scan(self) -> Listing | ListingFailed:
        await self._pause()
        self.listed = self._disk.listing()
        return self.listed

    async def signatures(self, paths: Sequence[str]) -> dict[str, str | Unreadable | None]:
        await self._pause()
        return {path: self._signature(path) for path in paths}

    def _signature(self, path: str) -> str | Unreadable | None:
        try:
            return signature_of(self._disk.at(path))
        except FileNotFoundError:
            return Unreadable("unmounted") if self._disk.hidden else None
        except OSError as error:
            return Unreadable(str(error))

    async def structure(self, path: str) -> Structure:
        await self._pause()
        return seen_at(path, self._disk.at(path)).structure

    async def glance(self, path: str) -> Structure:
        return await self.structure(path)

    async def examine(
        self,
        seen: Structure,
        reference: Reference | Base | None,
        options: Options,
        *,
        beside: bool = False,
        fingerprinted: bool = False,
    ) -> Evidence:
        await self._pause()
        path, before = seen.path, signature_of(self._disk.at(seen.path))
        await self._pause()
        folder = self._disk.at(path)
        if signature_of(folder) != before:
            return Evidence(failure=f"{path} changed while it was read")
        evidence = seen_at(path, folder).evidence
        evidence = replace(evidence, structure=seen) if seen.signature == before and not seen.faults else evidence
        return proving.beside(evidence) if beside else evidence

    async def read_again(self, path: str) -> ReadAgain:
        before = signature_of(self._disk.at(path))
        await self._pause()
        folder = self._disk.at(path)
        if signature_of(folder) != before:
            raise OSError(f"{path} changed while it was read")
        seen = seen_at(path, folder)
        if seen.structure.faults or seen.evidence.contents is None:
            return ReadAgain(before, None, "it is no checkpoint any more")
        sizes, digests = seen.structure.files, seen.evidence.contents.digests
        return ReadAgain(before, digest_of_files({name: (sizes[name].size, digests[name]) for name in digests}))

    async def sign_manifest(self, path: str, signature: str) -> None:
        await self._pause()
        if path not in self._disk.described:
            raise FileNotFoundError(path)
        self._disk.described[path] = signature

    async def keep_manifest(self, seen: Structure, manifest: Manifest) -> None:
        await self._pause()
        if not self._disk.keeps_manifests:
            raise OSError(28, "No space left on device")
        self._disk.described[seen.path] = seen.signature


class SimFolders:
    """The sweep's port. `discarded` is told of each folder before it goes."""

    def __init__(
        self,
        disk: SimDisk,
        pause: Callable[[], "Pause"],
        discarded: Callable[[str, SimFolder], None],
        recycled: Callable[[SimFolder], None],
    ) -> None:
        self._disk = disk
        self._pause = pause
        self._discarded = discarded
        self._recycled = recycled

    async def examine(self, path: str) -> Holdings | Gone | Refused:
        await self._pause()
        return self._look(path)

    async def free(self) -> int:
        return 2**60  # a disk that is full is a fault of its own: the simulation has none

    async def forget_manifests(self, paths: Sequence[str]) -> None:
        await self._pause()
        for path in self._disk.described.keys() - set(paths):
            del self._disk.described[path]

    async def weigh(self, paths: Sequence[str]) -> dict[str, Holdings | Gone | Refused]:
        await self._pause()
        return {path: self._look(path) for path in paths}

    def _look(self, path: str) -> Holdings | Gone | Refused:
        try:
            folder = self._disk.at(path)
            files = {"model.safetensors": signature_of(folder)}
            return Holdings(identity=Identity(1, folder.inode), seal=signature_of(folder), files=files, bytes=100)
        except FileNotFoundError:
            return Refused(path, "the root may be unmounted") if self._disk.hidden else Gone(path)
        except OSError as error:
            return Refused(path, str(error))

    async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
        await self._pause()
        found = await self.examine(path)
        if not isinstance(found, Holdings):
            return found
        if found != folder:
            return Refused(path, "it is not the folder that was examined")
        self._discarded(path, self._disk.folders[path])
        self._disk.trash.append(self._disk.folders.pop(path))
        await self._pause()
        return Discarded(path, str(folder.identity.inode))

    async def hand_back(self, discarded: Discarded, run: str) -> Slot | Refused:
        await self._pause()
        folder = next(folder for folder in self._disk.trash if str(folder.inode) == discarded.where)
        if folder.make.layout is None:
            return Refused(discarded.path, "its files are no slot's")
        self._recycled(folder)
        self._disk.trash.remove(folder)
        slot = self._slot(f"{folder.make.layout}-{folder.inode:032x}-{folder.writes}", folder)
        self._disk.slots[slot.name] = folder
        return slot

    async def slots(self) -> list[Slot]:
        await self._pause()
        return [] if self._disk.hidden else [self._slot(name, folder) for name, folder in self._disk.slots.items()]

    async def withdraw(self, slot: Slot) -> Discarded | Gone | Refused:
        await self._pause()
        folder = self._disk.slots.pop(slot.name, None)
        if folder is None:
            return Gone(slot.path)
        self._disk.trash.append(folder)
        return Discarded(slot.path, str(folder.inode))

    async def layout(self, path: str) -> str | None:
        await self._pause()
        folder = self._disk.folders.get(path)
        return None if folder is None else folder.make.layout

    def _slot(self, name: str, folder: SimFolder) -> Slot:
        return Slot(run="run", name=name, bytes=100, layout=folder.make.layout)

    async def survey(self, runs: Sequence[str]) -> list[Incoming]:
        await self._pause()
        why = {False: "its publisher is gone", True: "its publisher is alive"}
        found = [] if self._disk.hidden else list(self._disk.incoming.items())
        return [Incoming(path=path, abandoned=not lives, reason=why[lives], bytes=100) for path, lives in found]

    async def discard_abandoned(self, path: str) -> Discarded | Gone | Refused:
        await self._pause()
        assert not self._disk.incoming.pop(path, False), f"7: {path} is deleted while it is written"
        return Discarded(path)

    async def empty(self) -> Emptied:
        await self._pause()
        emptied = len(self._disk.trash)
        self._disk.trash.clear()
        return Emptied(emptied)

    async def trash_room(self) -> tuple[int, int]:
        await self._pause()
        return 100 * len(self._disk.trash), 0
