"""A rank proves its share of a version's tensors while the engine serves: nothing is written into the model.

Where the model is on a GPU, the GPU reads the files where they lie: on tmpfs their pages are registered with the CUDA
driver, as they are for the load. It reads them at the speed of the bus, by few enough programs that the engine's own
work has room beside. Fingerprints are held against the manifest here; the service decides, by the digest of what was
found.
"""

from collections.abc import Mapping, Sequence

import torch

from refitd_client.checkpoint.finite import rule_of
from refitd_client.checkpoint.header import Header, TensorSpec
from refitd_client.contract.plugin import TensorProof
from refitd_client.fingerprint.batch import PROGRAMS_OVER_BUS, AddressScan
from refitd_client.fingerprint.device import TensorPart
from refitd_client.fingerprint.host import width_of
from refitd_client.fingerprint.tensors import Scan, ScanInput, has_triton, scan
from refitd_client.validation.validate import proof_digest, share_of, unprovable
from refitd_plugin.memory.driver import Registry
from refitd_plugin.memory.source import VersionSource
from refitd_plugin.port import EngineProcess
from refitd_plugin.proof.contents import devices_of
from refitd_plugin.settings import PluginSettings

_KEPT_ADDRESSES = 8  # lists of addresses: one for each slot that the trainer writes in turns


class HostReader:
    """Reads tensors of a version's files with the processors, all of their bytes."""

    def read(self, source: VersionSource, names: Sequence[str]) -> Sequence[Scan] | None:
        tensors, specs = source.tensors(), source.structure.inventory.tensors
        return scan(ScanInput(tensors[name], rule_of(specs[name].dtype), is_view=True) for name in names)


class DeviceReader:
    """The same with one GPU. `registry`: the files that it reads in place."""

    def __init__(self, device: torch.device, registry: Registry) -> None:
        self._device, self._registry = device, registry
        self._stream: torch.cuda.Stream | None = None
        self._scans: list[tuple[Mapping[str, Header], Sequence[str], dict[str, int], AddressScan]] = []

    def read(self, source: VersionSource, names: Sequence[str]) -> Sequence[Scan] | None:
        """What was found; None where the GPU cannot read the files."""
        files = source.registered(self._registry, self._device.index or 0)
        if files is None:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        places = {name: file.address for name, file in files.items()}
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._scan(source.structure.headers, names, places).begin()()

    def _scan(self, headers: Mapping[str, Header], names: Sequence[str], places: dict[str, int]) -> AddressScan:
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
        found = AddressScan(parts, len(names), self._device, PROGRAMS_OVER_BUS)
        self._scans = [*self._scans[1 - _KEPT_ADDRESSES :], (headers, names, places, found)]
        return found


def _part(number: int, address: int, spec: TensorSpec) -> TensorPart:
    width = width_of(spec.dtype)
    count = (spec.end - spec.start) // width
    return TensorPart(number=number, now=address, count=count, width=width, rule=rule_of(spec.dtype), elements=count)


class VersionProver:
    """Proves versions for one rank. `rank` is tensor-parallel, of `ranks`."""

    def __init__(self, reader: HostReader | DeviceReader, rank: int, ranks: int) -> None:
        self._reader, self._rank, self._ranks = reader, rank, ranks

    def prove(self, source: VersionSource) -> TensorProof:
        """Read this rank's share, and hold it against the manifest.

        Raises:
            OSError: it cannot be read.
        """
        seen = source.structure
        if (why := unprovable(seen)) is not None or seen.manifest is None:
            return TensorProof(fault=f"the version {why}")
        expected = seen.manifest.fingerprints
        names = share_of(seen.headers, self._rank, self._ranks)
        scans = self._reader.read(source, names)
        if scans is None:
            return TensorProof(fault="the GPU cannot read the files where they lie")
        prints = {name: f"{each.fingerprint:016x}" for name, each in zip(names, scans, strict=True)}
        fault = ""
        if other := next((name for name in names if prints[name] != expected[name]), None):
            fault = f"tensor {other} has another fingerprint"
        elif bad := next((name for name, each in zip(names, scans, strict=True) if each.nonfinite), None):
            fault = f"tensor {bad} has non-finite values"
        elif not source.is_unchanged():
            fault = "the files changed while they were read"
        return TensorProof(tensors=len(names), digest=proof_digest(prints, names), fault=fault)


def prover_of(process: EngineProcess, registry: Registry, settings: PluginSettings) -> VersionProver | None:
    """What proves versions for a rank; None where nothing can read them for it, or the operator has it off. `registry`:
    the files that its GPU reads in place.
    """
    devices, reader = devices_of(process.model), None
    if not settings.prove:
        return None
    if len(devices) == 1 and has_triton():
        reader = DeviceReader(next(iter(devices)), registry)
    elif settings.on_host and not devices:
        reader = HostReader()
    return None if reader is None else VersionProver(reader, process.rank, process.size)
