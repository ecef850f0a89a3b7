"""What a receiver process does: it receives a transfer into memory of its own, proves it, and offers it to its rank.

That memory is on the rank's GPU, where there is room beside the model, else in a file of shared memory of the host. It
has room for the whole version, or for the slices that are sent where the rank needs no more, and stays for the next
transfer. The offer of the transfer before is withdrawn first: while the rank still copies from it, nothing is written
there.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.group.child import Order, OrderFailed, Receive, Received, Reply
from refitd_client.transport.group.host_staging import ArrivalScan, PinnedMemory
from refitd_client.transport.group.membership import BroadcastGroup, TransferError, WaitLimit, hear, join_store, say
from refitd_client.transport.group.transfer import (
    BLOCK_BYTES,
    IN_FLIGHT,
    MOST_STREAMS,
    Done,
    Go,
    Ready,
    flat_layout,
    key,
)
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.exported_memory import LayoutCache
from refitd_client.transport.ipc.offer import GroupTransfer, Offer, OfferedTensor, OfferRefusedError
from refitd_client.transport.ipc.offer_file import (
    ExportedTensors,
    HandoverKeyRefusedError,
    ImportedTensors,
    read_secret,
)
from refitd_client.transport.ipc.shared import PREFIX, SHARED_MEMORY, NotSharedError, SharedTensors
from refitd_client.transport.shards.lanes import LaneMember
from refitd_client.transport.shards.needs import numbered
from refitd_client.transport.shards.packing import PackedPlaces, packed_layout
from refitd_client.transport.shards.proving import KnownNeeds, check_arrived, prove_needed

_REFUSALS = (
    TransferError, OfferRefusedError, HandoverKeyRefusedError, DriverError, NotSharedError, OSError, ValueError,
)  # fmt: skip
_BACK_SECONDS = 5.0  # in which the rank is to have ended its copy of the transfer before
_SPARE_BYTES = 2**30  # of the GPU's memory, which are left for the engine


class StagedTensors:
    """Memory for the tensors of an offer, in one piece. `tensors` are views of it, by name; where the receiver keeps
    slices alone, they lie in each other's gaps, and only what it needs of them is of use.
    """

    def __init__(self, offered: Sequence[OfferedTensor], places: PackedPlaces, owner: str, *, on_device: bool) -> None:
        """Allocate it.

        Args:
            offered: names, dtypes and shapes.
            places: where each lies.
            owner: the receiver's name in the transfer, which no other rank has. Files of a process that had it before,
                and was killed, are removed.
            on_device: on the GPU, where there is room.

        Raises:
            OSError: there is no room in /dev/shm.
        """
        self.specs = tuple((each.name, each.dtype, each.shape) for each in offered)
        self.places = places
        layout = places.packed
        self._shared: SharedTensors | None = None
        self._pinned: PinnedMemory | None = None
        self._arrivals: dict[int, ArrivalScan] = {}
        if on_device and torch.cuda.mem_get_info()[0] >= layout.nbytes + _SPARE_BYTES:
            self.flat: Any = torch.empty(max(layout.nbytes, 1), dtype=torch.uint8, device="cuda")
            self.tensors = {
                name: self.flat[at : at + size].view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)
                for (name, dtype, shape), at, size in zip(self.specs, layout.offsets, layout.sizes, strict=True)
            }
            return
        for left in SHARED_MEMORY.glob(f"{PREFIX}{owner}-*"):
            left.unlink(missing_ok=True)
        specs = {name: (dtype, shape) for name, dtype, shape in self.specs}
        self._shared = SharedTensors(specs, owner=f"{owner}-", laid=(layout.offsets, layout.nbytes))
        self.tensors = self._shared.tensors
        self.flat = self._shared.flat[: layout.nbytes]
        if on_device:  # its GPU is too full, and reads and writes this
            self._pinned = PinnedMemory(self._shared.flat)

    @property
    def is_on_device(self) -> bool:
        """Whether it is a GPU's memory."""
        return self._shared is None

    def arrivals(self, block: int) -> ArrivalScan | None:
        """What the GPU finds of tensors in host memory as they arrive, in blocks of that many bytes at most. None where
        they are on it, it does not read that memory, or only slices are kept.
        """
        if self._pinned is None or not self._pinned.is_pinned or not ArrivalScan.is_possible():
            return None
        if self.places.packed is not self.places.whole:
            return None
        if block not in self._arrivals:
            self._arrivals[block] = ArrivalScan(list(self.tensors.values()), self.places.packed, block)
        return self._arrivals[block]

    def close(self) -> None:
        """Give it back. Nothing else may refer to its tensors."""
        self.tensors, self.flat = {}, None
        self._arrivals.clear()
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        if self._shared is not None:
            self._shared.close()
        else:
            torch.cuda.empty_cache()  # torch would keep it for this process

    def abandon(self) -> None:
        """Remove what would outlive the process. Calls nothing of CUDA, which may wait for a sender that is gone."""
        if self._shared is not None:
            self._shared.close()


class ReceiverProcess:
    """The work of a receiver process. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._group: BroadcastGroup | None = None
        self._lanes, self._needs = LaneMember(), KnownNeeds()
        self._known: Offer | None = None
        self._staged: StagedTensors | None = None
        self._kept: tuple[object, str] | None = None
        self._layouts = LayoutCache()
        self._exported: ExportedTensors | None = None

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        """Carry out one order."""
        if not isinstance(order, Receive):
            return OrderFailed("it is a receiver, and sends nothing")
        try:
            return self._receive(order, WaitLimit(order.within, stopped))
        except _REFUSALS as error:
            return OrderFailed(str(error) or type(error).__name__)

    def end(self) -> None:
        """Remove the files that would outlive the process."""
        if self._exported is not None:
            self._exported.take_back(0.0)
        if self._staged is not None:
            self._staged.abandon()

    def _receive(self, order: Receive, waiting: WaitLimit) -> Received:
        root, ms = Path(order.root), dict[str, float]()
        imported = ImportedTensors(root / order.offer, secret := read_secret(root), self._known)
        imported.close()
        offer = self._known = imported.offer
        transfer = offer.transfer
        if transfer is None or order.name not in transfer.receivers:
            raise TransferError("the offer is of no transfer to this rank")
        began = time.perf_counter()
        self._join(transfer, waiting)
        try:
            staged = self._stage(offer, order)
        except _REFUSALS as error:
            say(self._store, key(transfer.name, "ready", order.name), Ready(refused=f"{error}"))
            raise
        held = self._lanes.number if transfer.senders else 0 if self._group is None else self._group.number
        say(self._store, key(transfer.name, "ready", order.name), Ready(group=held, streams=MOST_STREAMS))
        go = hear(self._store, key(transfer.name, "go"), Go, waiting)
        self._follow(go, order.name, transfer, waiting)
        ms["join"] = _since(began)
        began = time.perf_counter()
        try:
            self._take(staged, transfer, waiting)
            ms["receive"] = _since(began)
            began = time.perf_counter()
            exported = self._prove(offer, staged, order, secret)
        except BaseException as error:
            self._leave()
            say(self._store, key(transfer.name, "done", order.name), Done(refused=f"{error}"))
            raise
        ms["prove"] = _since(began)
        say(self._store, key(transfer.name, "done", order.name), Done())
        self._exported = exported
        return Received(offer=exported.path.name, ms=ms)

    def _join(self, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        """Connect to the sender's store. Another sender has no group of ours."""
        if self._address != (address := (transfer.host, transfer.port)):
            self._leave()
            self._address, self._store = None, join_store(*address, waiting)
            self._address = address

    def _stage(self, offer: Offer, order: Receive) -> StagedTensors:
        """Memory that the rank does not read.

        Raises:
            TransferError: it still copies the transfer before, or it is not known what it needs.
        """
        exported, self._exported = self._exported, None
        if exported is not None and not exported.take_back(_BACK_SECONDS):
            self._exported = exported
            raise TransferError("the engine still copies what was received before")
        specs = tuple((each.name, each.dtype, each.shape) for each in offer.layout.tensors)
        kept = specs, order.needs
        if self._staged is None or self._kept != kept:
            if self._staged is not None:
                self._layouts = LayoutCache()  # it refers to the tensors
                self._staged.close()
                self._staged = None
            places = self._places(offer, order)
            self._staged = StagedTensors(offer.layout.tensors, places, order.name, on_device=order.on_device)
            self._kept = kept
        return self._staged

    def _places(self, offer: Offer, order: Receive) -> PackedPlaces:
        """Where the tensors are to lie: side by side, or packed where only slices are sent."""
        whole = flat_layout(offer.layout.tensors)
        if not order.needs:
            return PackedPlaces(whole=whole, packed=whole)
        needs = numbered(self._needs.of(order, offer), [each.name for each in offer.layout.tensors])
        return PackedPlaces(whole=whole, packed=packed_layout(whole.sizes, needs))

    def _follow(self, go: Go, name: str, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        """Be a member of the group that sends.

        Raises:
            TransferError: nothing is sent, or this one has no part in it.
        """
        if go.refused:
            raise TransferError(f"nothing is sent: {go.refused}")
        if name not in go.ranks:
            raise TransferError("the sender has begun without this rank, which was not ready in time")
        if transfer.senders:
            self._lanes.follow(go, name, transfer.backend, self._store, transfer.host, waiting)
            return
        if self._group is None or self._group.number != go.group:
            self._leave()
            self._group = BroadcastGroup(transfer.backend, self._store, go, go.ranks[name], transfer.host, waiting)

    def _take(self, staged: StagedTensors, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        scan = staged.arrivals(BLOCK_BYTES[transfer.backend])
        if scan is not None:
            scan.restart()
        if transfer.senders:
            self._lanes.run(staged.flat, transfer.backend, waiting, sends=False, places=staged.places)
            return
        if self._group is None:
            raise TransferError("there is no group")
        bounds = staged.places.whole.blocks(BLOCK_BYTES[transfer.backend])
        if (transfer.backend == "nccl") == staged.is_on_device:
            seen = _ignored if scan is None else scan.arrived
            self._group.broadcast((staged.flat[begin:end] for begin, end in bounds), waiting, seen)
            return
        # They arrive in another memory than they are kept in: through a ring, one block more than are under way.
        device, size = "cuda" if transfer.backend == "nccl" else "cpu", BLOCK_BYTES[transfer.backend]
        ring = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT[transfer.backend] + 1)]

        def keep(number: int) -> None:
            begin, end = bounds[number]
            staged.flat[begin:end].copy_(ring[number % len(ring)][: end - begin], non_blocking=scan is not None)
            if scan is not None:
                scan.arrived(number)

        blocks = (ring[number % len(ring)][: end - begin] for number, (begin, end) in enumerate(bounds))
        self._group.broadcast(blocks, waiting, keep)

    def _prove(self, offer: Offer, staged: StagedTensors, order: Receive, secret: bytes) -> ExportedTensors:
        """Hold what has arrived against the trainer's fingerprints, and offer it.

        Raises:
            TransferError: it is something else.
        """
        prepared = self._layouts.prepare(staged.tensors, [NO_RULE] * len(staged.tensors))
        if order.needs:
            prove_needed(offer, staged.tensors, order.needs, self._needs.of(order, offer))
        else:
            scan = None if offer.transfer is None else staged.arrivals(BLOCK_BYTES[offer.transfer.backend])
            found = [each.fingerprint for each in (prepared.scan() if scan is None else scan.finish())]
            for tensor, mine, announced in zip(offer.layout.tensors, found, offer.fingerprints, strict=True):
                check_arrived(tensor.name, mine, announced)
        return ExportedTensors(Path(order.folder), prepared.offer(offer.version, offer.fingerprints), secret)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._lanes.leave()


def _ignored(_: int) -> None:
    pass


def _since(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 2)
