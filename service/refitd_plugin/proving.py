"""A rank proves its share of a version's tensors while the engine serves: nothing is written into the model.

Where the model is on a GPU, that reads the files where they lie: on tmpfs their pages are registered with the CUDA
driver, as they are for the load. It reads them at the speed of the bus, by few enough programs that the engine's own
work has room beside. Where the operator allows it, and the rank holds the whole model, the files are copied to the GPU
instead and read there, and the load copies from there. Both begin while the trainer writes the version.

Fingerprints are held against the manifest here; the service decides, by the digest of what was found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.checkpoint.strict_header import Header, TensorSpec
from refitd_client.contract.plugin import TensorProof
from refitd_client.fingerprint.batch import PROGRAMS_OVER_BUS, AddressScan
from refitd_client.fingerprint.host import width_of
from refitd_client.fingerprint.rows import TensorPart
from refitd_client.fingerprint.tensors import Scan, ScanInput, has_triton, scan
from refitd_client.validation.proof import proof_digest, share_of, unprovable
from refitd_plugin import driver
from refitd_plugin.contents import devices_of
from refitd_plugin.copy_ahead import BufferCopy, buffer_copy
from refitd_plugin.moves import MemoryMove
from refitd_plugin.port import EngineProcess
from refitd_plugin.read_ahead import ScanBatch, TensorsAhead, batches_of
from refitd_plugin.registered import Registry
from refitd_plugin.settings import PluginSettings
from refitd_plugin.source import VersionSource
from refitd_plugin.staging import FileOnDevice, StagingBuffer
from refitd_plugin.trainer_follower import Ahead, FileLayout, Files, Layout, TrainerFollower

_KEPT_ADDRESSES = 8  # lists of addresses: one for each slot that the trainer writes in turns

Staged = Mapping[str, FileOnDevice]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of tensors: their fingerprints and non-finite values, and the files that stay on the GPU, if any
    do. `ahead` bytes of them were copied there, or read, while the trainer wrote them.
    """

    scans: Sequence[Scan]
    staged: Staged | None = None
    ahead: int = 0


def _always(*_: object) -> bool:
    return True


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRules:
    """When a rank follows a trainer that writes a version. `wants_files` and `is_updated` as in `TrainerFollower`.
    `may_read`: whether a load of a version holds all that it has written against the manifest. `may_copy`: whether it
    does, or has all from the GPU where the version's files were copied there.
    """

    wants_files: Callable[[], bool] = _always
    is_updated: Callable[[], bool] = _never
    may_read: Callable[[VersionSource], bool] = _always
    may_copy: Callable[[VersionSource], bool] = _always


class TensorReader(Protocol):
    """Reads tensors of a version's files, all of their bytes."""

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        """Read these tensors; None where the files cannot be read so."""
        ...


class HostReader:
    """Reads with the processors. The class is a `TensorReader`."""

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        tensors, specs = source.tensors(), source.structure.inventory.tensors
        return Reading(scan(ScanInput(tensors[name], rule_of(specs[name].dtype), is_view=True) for name in names))


class DeviceReader:
    """Reads with one GPU. The class is a `TensorReader`."""

    def __init__(
        self,
        device: torch.device,
        registry: Registry,
        *,
        stage: bool,
        follow: FollowRules = FollowRules(),
    ) -> None:
        """Read nothing yet.

        Args:
            device: the GPU.
            registry: the files that it reads in place.
            stage: whether what is read may stay on the GPU, where there is room.
            follow: when it follows a trainer.
        """
        self._device, self._registry, self._rules = device, registry, follow
        self._may_read = self._may_copy = False  # while the trainer still writes
        self._is_whole = True  # whether all tensors are this rank's to read
        self._in_use: list[Files] = []  # the GPU may still read what was begun and dropped: it stays mapped
        self._buffer = StagingBuffer(device) if stage else None
        self._follower = TrainerFollower(
            registry.known, self._start, self._on_device, self._wants_files, follow.is_updated
        )
        self._stream: torch.cuda.Stream | None = None
        self._scans: list[tuple[Mapping[str, Header], Sequence[str], dict[str, int], AddressScan]] = []
        self._batches: list[tuple[Layout, dict[str, int], Mapping[str, Sequence[ScanBatch]]]] = []

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        files = source.registered(self._registry, self._device.index or 0)
        if files is None:
            return None
        self._may_read, self._may_copy = self._rules.may_read(source), self._rules.may_copy(source)
        self._is_whole = len(names) == len(source.structure.inventory.tensors)
        before = len(self._in_use)
        found = self._found(source, names, files)
        del self._in_use[:before]  # what was begun before has ended: all goes along one stream
        return found

    def _found(self, source: VersionSource, names: Sequence[str], files: Files) -> Reading:
        headers = source.structure.headers
        with self._on_device():
            found, ahead = self._follower.finished(source.place, files, layout_of(source, names))
            if isinstance(found, BufferCopy):
                staged = found.taken()
                places = {name: file.address for name, file in staged.items()}
                return Reading(self._scan(headers, names, places, programs=None).begin()(), staged, ahead)
            if isinstance(found, TensorsAhead):
                scans = found.scans()
                return Reading([scans[name] for name in names], ahead=ahead)
            places = {name: file.address for name, file in files.items()}
            return Reading(self._scan(headers, names, places, programs=PROGRAMS_OVER_BUS).begin()())

    def _wants_files(self) -> bool:
        may_look = self._may_read if self._buffer is None else self._may_copy
        return may_look and self._rules.wants_files()

    def _start(self, files: Files, layout: Layout) -> Ahead | None:
        """A copy into the buffer, of a rank that holds the whole model. Where there is no buffer, or no room, a look at
        the rank's tensors where they are.
        """
        self._in_use.append(files)
        take = None if self._buffer is None or not self._is_whole else self._buffer.take
        copy = None if take is None else buffer_copy(files, layout, take, self._begin_move)
        if copy is not None or not self._may_read:
            return copy
        return TensorsAhead(files=files, layout=layout, batches=self._batches_of(files, layout))

    def _begin_move(self, move: MemoryMove, above: int) -> None:
        driver.to_device(move, above, self._used_stream.cuda_stream)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._used_stream):
            yield

    @property
    def _used_stream(self) -> torch.cuda.Stream:
        """One for copies and reading: what is read was copied before."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    def _scan(
        self, headers: Mapping[str, Header], names: Sequence[str], places: dict[str, int], programs: int | None
    ) -> AddressScan:
        """The list of addresses, made once for each slot."""
        for known in self._scans:
            if known[2] == places and known[1] == names and known[0] == headers:
                return known[3]
        number = {name: at for at, name in enumerate(names)}
        parts = [
            _part(number[name], places[file] + header.data_start + spec.start, spec)
            for file, header in headers.items()
            for name, spec in header.tensors.items()
            if name in number
        ]
        found = AddressScan(parts, len(names), self._device, programs)
        self._scans = [*self._scans[1 - _KEPT_ADDRESSES :], (headers, names, places, found)]
        return found

    def _batches_of(self, files: Files, layout: Layout) -> Mapping[str, Sequence[ScanBatch]]:
        """The batches of each file, made once for each slot."""
        places = {name: files[name].address for name in layout}
        for known in self._batches:
            if known[1] == places and known[0] == layout:
                return known[2]
        found = {name: list(self._batches_in(file, places[name])) for name, file in layout.items()}
        self._batches = [*self._batches[1 - _KEPT_ADDRESSES :], (layout, places, found)]
        return found

    def _batches_in(self, file: FileLayout, address: int) -> Iterator[ScanBatch]:
        for names in batches_of([(name, spec.end - spec.start) for name, spec in file.tensors.items()]):
            specs = [file.tensors[name] for name in names]
            parts = [_part(number, address + file.begin + spec.start, spec) for number, spec in enumerate(specs)]
            scan = AddressScan(parts, len(parts), self._device, PROGRAMS_OVER_BUS)
            yield ScanBatch(names, file.begin + max(spec.end for spec in specs), scan)


def layout_of(source: VersionSource, names: Sequence[str]) -> Layout:
    """The layout of a version's files, of whose tensors those of these names count."""
    seen, wanted = source.structure, frozenset(names)
    return {
        name: FileLayout(
            seen.files[name].size,
            header.data_start,
            {each: spec for each, spec in header.tensors.items() if each in wanted},
        )
        for name, header in seen.headers.items()
    }


def _part(number: int, address: int, spec: TensorSpec) -> TensorPart:
    width = width_of(spec.dtype)
    count = (spec.end - spec.start) // width
    return TensorPart(number=number, now=address, count=count, width=width, rule=rule_of(spec.dtype), elements=count)


class VersionProver:
    """Proves versions for one rank. `rank` is tensor-parallel, of `ranks`."""

    def __init__(self, reader: TensorReader, rank: int, ranks: int) -> None:
        self._reader, self._rank, self._ranks = reader, rank, ranks

    def prove(self, source: VersionSource) -> tuple[TensorProof, Staged | None]:
        """Read this rank's share, and hold it against the manifest. Returns files on the GPU only where all is proved.

        Raises:
            OSError: it cannot be read.
        """
        seen = source.structure
        if (why := unprovable(seen)) is not None or seen.manifest is None:
            return TensorProof(fault=f"the version {why}"), None
        expected = seen.manifest.fingerprints
        names = share_of(seen.headers, self._rank, self._ranks)
        reading = self._reader.read(source, names)
        if reading is None:
            return TensorProof(fault="the GPU cannot read the files where they lie"), None
        prints, fault = _found(reading, names, expected)
        if fault and reading.ahead:  # its trainer may have written a byte after it said that it would not change
            reading = None  # the buffer is free
            reading = self._reader.read(source, names)
            if reading is None:
                return TensorProof(fault="the GPU cannot read the files where they lie any more"), None
            prints, fault = _found(reading, names, expected)
        if not fault and not source.is_unchanged():
            fault = "the files changed while they were read"
        staged = reading.staged
        proof = TensorProof(
            tensors=len(names),
            digest=proof_digest(prints, names),
            fault=fault,
            staged=staged is not None and not fault,
            ahead=reading.ahead,
        )
        return proof, None if fault else staged


def _found(reading: Reading, names: Sequence[str], expected: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The tensors' fingerprints, and what is wrong with the first that is not as the manifest says, "" for nothing."""
    scans = reading.scans
    prints = {name: f"{each.fingerprint:016x}" for name, each in zip(names, scans, strict=True)}
    if other := next((name for name in names if prints[name] != expected[name]), None):
        return prints, f"tensor {other} has another fingerprint"
    if bad := next((name for name, each in zip(names, scans, strict=True) if each.nonfinite), None):
        return prints, f"tensor {bad} has non-finite values"
    return prints, ""


def prover_of(
    process: EngineProcess, registry: Registry, settings: PluginSettings, follow: FollowRules
) -> VersionProver | None:
    """What proves versions for a rank; None where nothing can read them for it, or the operator has it off.

    Args:
        process: the rank's.
        registry: the files that its GPU reads in place.
        settings: the operator's.
        follow: when it follows a trainer.
    """
    devices, reader = devices_of(process.model), None
    if not settings.prove:
        return None
    if len(devices) == 1 and has_triton():
        reader = DeviceReader(next(iter(devices)), registry, stage=settings.stage, follow=follow)
    elif settings.on_host and not devices:
        reader = HostReader()
    return None if reader is None else VersionProver(reader, process.rank, process.size)
