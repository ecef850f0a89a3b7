"""A rank proves its share of a version's tensors while the engine serves: nothing is written into the model.

Where the model is on a GPU, that reads the files where they lie: on tmpfs their pages are registered with the CUDA
driver, as they are for the load. It reads them at the speed of the bus, by few enough programs that the engine's own
work has room beside. Where the operator allows it, and the rank holds the whole model, the files are copied to the GPU
instead and read there, and the load copies from there.

Fingerprints are held against the manifest here; the service decides, by the digest of what was found.

Staged files lie on the GPU beside the model that is served, and are copied into it at the speed of the GPU's memory and
not of the bus. There is one buffer, made for the first version that is staged and kept for the next ones, so that the
engine's own memory is asked for once. It is not written while anything refers to what lies in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.checkpoint.header import Header, TensorSpec
from refitd_client.contract.plugin import TensorProof
from refitd_client.fingerprint.batch import PROGRAMS_OVER_BUS, AddressScan
from refitd_client.fingerprint.device import TensorPart
from refitd_client.fingerprint.host import width_of
from refitd_client.fingerprint.tensors import Scan, ScanInput, has_triton, scan
from refitd_client.validation.validate import proof_digest, share_of, unprovable
from refitd_plugin.memory import driver
from refitd_plugin.memory.driver import Registered, Registry
from refitd_plugin.memory.source import VersionSource
from refitd_plugin.memory.spans import MemoryMove
from refitd_plugin.port import EngineProcess
from refitd_plugin.proof.contents import devices_of
from refitd_plugin.settings import PluginSettings

_STAGED_ALIGNMENT = 512  # bytes: where tensors begin, as torch's own do
_FREE_SHARE = 0.5  # of the GPU's free memory: the engine needs some for long prompts


class StagingLease:
    """Keeps the buffer from being written again as long as it lives."""


@dataclass(frozen=True, slots=True)
class FileOnDevice:
    """One file on the GPU: the address of its first byte."""

    address: int
    lease: StagingLease


class StagingBuffer:
    """The buffer of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._lease: ref[StagingLease] | None = None

    def take(self, files: Mapping[str, tuple[int, int]]) -> dict[str, FileOnDevice] | None:
        """Room for files; None where the buffer is in use or the GPU has too little memory free. `files`: by name, the
        size of each and the byte in it where its tensors begin.
        """
        if self._lease is not None and self._lease() is not None:
            return None
        places: dict[str, int] = {}
        end = 0
        for name, (size, begin) in files.items():
            places[name] = -(-(end + begin) // _STAGED_ALIGNMENT) * _STAGED_ALIGNMENT - begin
            end = places[name] + size
        memory = self._memory_of(end)
        if memory is None:
            return None
        lease = StagingLease()
        self._lease = ref(lease)
        return {name: FileOnDevice(memory.data_ptr() + place, lease) for name, place in places.items()}

    def _memory_of(self, size: int) -> torch.Tensor | None:
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            free, _ = torch.cuda.mem_get_info(self._device)
            if size > free * _FREE_SHARE:
                return None
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory


_KEPT_ADDRESSES = 8  # lists of addresses: one for each slot that the trainer writes in turns

Staged = Mapping[str, FileOnDevice]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of tensors: their fingerprints and non-finite values, and the files that stay on the GPU, if any
    do.
    """

    scans: Sequence[Scan]
    staged: Staged | None = None


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

    def __init__(self, device: torch.device, registry: Registry, *, stage: bool) -> None:
        """Read nothing yet. `registry`: the files that it reads in place. `stage`: whether what is read may stay on the
        GPU, where there is room.
        """
        self._device, self._registry = device, registry
        self._buffer = StagingBuffer(device) if stage else None
        self._stream: torch.cuda.Stream | None = None
        self._scans: list[tuple[Mapping[str, Header], Sequence[str], dict[str, int], AddressScan]] = []

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        files = source.registered(self._registry, self._device.index or 0)
        if files is None:
            return None
        headers = source.structure.headers
        with self._on_device():
            staged = self._staged(source, names, files)
            if staged is None:
                places = {name: file.address for name, file in files.items()}
                return Reading(self._scan(headers, names, places, programs=PROGRAMS_OVER_BUS).begin()())
            places = {name: file.address for name, file in staged.items()}
            return Reading(self._scan(headers, names, places, programs=None).begin()(), staged)

    def _staged(
        self, source: VersionSource, names: Sequence[str], files: Mapping[str, Registered]
    ) -> dict[str, FileOnDevice] | None:
        """Begin to copy the files to the GPU; None where they are read in place: there is no buffer or no room, or
        the rank holds a part of the model alone.
        """
        seen = source.structure
        if self._buffer is None or len(names) != len(seen.inventory.tensors):
            return None
        staged = self._buffer.take(
            {name: (seen.files[name].size, header.data_start) for name, header in seen.headers.items()}
        )
        for name, file in (staged or {}).items():
            move = MemoryMove(file.address, 0, seen.files[name].size)
            driver.to_device(move, files[name].address, self._used_stream.cuda_stream)
        return staged

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
        if not fault and not source.is_unchanged():
            fault = "the files changed while they were read"
        staged = reading.staged
        proof = TensorProof(
            tensors=len(names),
            digest=proof_digest(prints, names),
            fault=fault,
            staged=staged is not None and not fault,
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


def prover_of(process: EngineProcess, registry: Registry, settings: PluginSettings) -> VersionProver | None:
    """What proves versions for a rank; None where nothing can read them for it, or the operator has it off. `registry`:
    the files that its GPU reads in place.
    """
    devices, reader = devices_of(process.model), None
    if not settings.prove:
        return None
    if len(devices) == 1 and has_triton():
        reader = DeviceReader(next(iter(devices)), registry, stage=settings.stage)
    elif settings.on_host and not devices:
        reader = HostReader()
    return None if reader is None else VersionProver(reader, process.rank, process.size)
