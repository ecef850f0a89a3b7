"""An offer of a trainer's tensors: where each lies and what it holds, for a process on this host."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from refitd_client.checkpoint.finite import NO_RULE, Rule
from refitd_client.fingerprint import Scan, ScanInput, begin_scan
from refitd_client.tensors.source import DTYPES
from refitd_client.transport.ipc import device, shared
from refitd_client.transport.ipc.offer import HostPlace, Offer, OfferedTensor, OfferLayout, offer_with
from refitd_client.transport.ipc.shared import boot_id, host_name

if TYPE_CHECKING:
    from refitd_client.fingerprint.batch import FixedScan


@dataclass(frozen=True, slots=True)
class _KnownLayout:
    """A layout, and what it holds for. `where` is name, address, dtype and shape of each tensor, `line` the layout as
    JSON. `memories` are the memories that the tensors lie in (a file's path or an allocation's number), by an address.
    """

    where: tuple[tuple[str, int, Any, Any], ...]
    layout: OfferLayout
    line: bytes
    memories: Mapping[int, int | str]


@dataclass(frozen=True, slots=True)
class PreparedOffer:
    """Tensors about to be offered. `scan` waits for their fingerprints, which are computed where they lie."""

    scan: Callable[[], list[Scan]]
    _known: _KnownLayout

    def offer(self, version: str, fingerprints: Sequence[int]) -> Offer:
        """Offer them as a version."""
        return offer_with(self._known.layout, version, fingerprints, self._known.line)


class LayoutCache:
    """The layout of the tensors that were offered last: made anew only when one of them has moved."""

    def __init__(self) -> None:
        self._known: _KnownLayout | None = None
        self._fixed: tuple[_KnownLayout, FixedScan | None] | None = None

    def prepare(self, tensors: Mapping[str, Any], rules: Sequence[Rule]) -> PreparedOffer:
        """Describe tensors, and begin to scan them. The scan has to end before they change.

        Args:
            tensors: by name, all contiguous, as they are published.
            rules: their dtypes', for NaN and infinity; the same at each step.

        Raises:
            DriverError, NotSharedError: the memory of one cannot be exported.
        """
        from refitd_client.fingerprint.batch import FixedScan

        where = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        known = self._known
        # An address alone says nothing: memory may have been freed, and other memory be at its place.
        if known is None or known.where != where or any(_memory_at(at, it) != it for at, it in known.memories.items()):
            known = self._known = _described(tensors, where)
        inputs = [ScanInput(tensor, rule, True) for tensor, rule in zip(tensors.values(), rules, strict=True)]
        if self._fixed is None or self._fixed[0] is not known:
            self._fixed = known, FixedScan.of(inputs)
        fixed = self._fixed[1]
        return PreparedOffer(begin_scan(inputs) if fixed is None else fixed.begin(), known)


def offer_of(version: str, tensors: Mapping[str, Any]) -> Offer:
    """A single offer. Waits for the fingerprints.

    Raises:
        DriverError, NotSharedError: the memory of a tensor cannot be exported.
    """
    prepared = LayoutCache().prepare(tensors, [NO_RULE] * len(tensors))
    return prepared.offer(version, [each.fingerprint for each in prepared.scan()])


def _described(tensors: Mapping[str, Any], where: tuple[tuple[str, int, Any, Any], ...]) -> _KnownLayout:
    offered: list[OfferedTensor] = []
    addresses: dict[int | str, int] = {}  # one for each memory
    for (name, address, _, _), tensor in zip(where, tensors.values(), strict=True):
        place = device.place_of(tensor) if tensor.device.type == "cuda" else shared.place_of(tensor)
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        offered.append(OfferedTensor(name, dtype, tuple(tensor.shape), place))
        if tensor.nbytes:
            addresses.setdefault(place.path if isinstance(place, HostPlace) else place.serial, address)
    layout = OfferLayout(
        host=host_name(), boot=boot_id(), pid=os.getpid(), life=_ProcessLife.drawn, tensors=tuple(offered)
    )
    memories = {address: memory for memory, address in addresses.items()}
    return _KnownLayout(where, layout, msgspec.json.encode(layout), memories)


def _memory_at(address: int, known: int | str) -> int | str | None:
    """The memory of the same kind that is there now: a file, by its path, or an allocation, by its number."""
    return shared.path_at(address) if isinstance(known, str) else device.serial_at(address)


class _ProcessLife:
    """A random text that no other process has, not even one with this one's pid in another container."""

    drawn = secrets.token_hex(8)

    @classmethod
    def draw(cls) -> None:
        cls.drawn = secrets.token_hex(8)


os.register_at_fork(after_in_child=_ProcessLife.draw)
