"""The processes that send and receive: `python -m refitd_client.transport.processes send|receive|join FD`, with an end
of a socket.

No collective runs in the trainer, in an engine or in the service: a hung one holds up none of them. A trainer process
has a sender process, each engine rank a receiver process beside it, and either may be killed at any moment.

A sender opens its trainer process's memory as an engine on the host would, and sends what is its own. The first one has
the store, plans, and collects what the receivers say. The others follow it.

A receiver receives a transfer into memory of its own, proves it against the fingerprints of the trainer's offer, and
offers it to its rank as a trainer on the same host would. So a transfer ends before the engine is paused, and the
engine's part is that of a hand-over. That memory is on the rank's GPU, where there is room beside the model, else in a
file of shared memory of the host. It has room for the whole version, or for the slices that are sent where the rank
needs no more, and stays for the next transfer. The offer of the transfer before is withdrawn first: while the rank
still copies from it, nothing is written there.
"""

import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.child import (
    Open,
    Opened,
    Order,
    OrderFailed,
    Receive,
    Received,
    Reply,
    Send,
    TransferSent,
    serve,
)
from refitd_client.transport.device import DriverError
from refitd_client.transport.member import MemberProcess
from refitd_client.transport.membership import (
    FlatMemory,
    LaneMember,
    TransferError,
    WaitLimit,
    hear,
    open_store,
    say,
)
from refitd_client.transport.memory import (
    PREFIX,
    SHARED_MEMORY,
    ImportedMemory,
    LayoutCache,
    NotSharedError,
    SharedTensors,
)
from refitd_client.transport.needs import PackedPlaces, flat_layout, numbered, packed_layout
from refitd_client.transport.offer import (
    GroupTransfer,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    side_by_side,
)
from refitd_client.transport.offer_file import (
    ExportedTensors,
    HandoverKeyRefusedError,
    ImportedTensors,
    read_secret,
)
from refitd_client.transport.proving import KnownNeeds, PinnedMemory, check_arrived, prove_needed
from refitd_client.transport.schedule import everything, schedule
from refitd_client.transport.script import (
    BLOCK_BYTES,
    MOST_STREAMS,
    Done,
    Go,
    Ready,
    ShardTable,
    StandingLanes,
    decide_lanes,
    key,
    script_of,
    sender_name,
    why_absent,
)

_REFUSALS = (
    TransferError, OfferRefusedError, HandoverKeyRefusedError, DriverError, NotSharedError, OSError, ValueError,
)  # fmt: skip
_BACK_SECONDS = 5.0  # in which the rank is to have ended its copy of the transfer before
_SPARE_BYTES = 2**30  # of the GPU's memory, which are left for the engine


class SenderProcess:
    """The work of a sender process. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._memory, self._member = ImportedMemory(), LaneMember()
        self._opened: tuple[OfferLayout, FlatMemory] | None = None
        self._own_store: Any = None
        self._standing: StandingLanes | None = None
        self._numbered = 0

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        try:
            match order:
                case Open(host):
                    self._own_store, port = open_store(host)
                    return Opened(port)
                case Send():
                    return self.send(order, stopped)
                case _:
                    return OrderFailed("it is a sender, and receives nothing")
        except _REFUSALS as error:
            return OrderFailed(str(error) or type(error).__name__)

    def end(self) -> None:
        """Nothing of it outlives the process."""

    def send(self, order: Send, stopped: Callable[[], bool]) -> TransferSent:
        """Send what the trainer process has. Raises TransferError: nothing has arrived, or it is not known what has."""
        waiting = WaitLimit(order.within, stopped)
        joining = WaitLimit(min(order.join, order.within), stopped)
        ms, began = dict[str, float](), time.perf_counter()
        try:
            memory = self._memory_of(order.layout)
            go, others = self._joined(order, joining, waiting)
            ms["join"] = _since(began)
            began = time.perf_counter()
            sent = self._member.run(memory, order.transfer.backend, waiting, sends=True)
            ms["send"] = _since(began)
            if order.number:
                return TransferSent(refused={}, ms=ms, nbytes=sent)
            began = time.perf_counter()
            refused = {name: self._done(order.transfer, name, waiting) for name in go.receivers}
            ms["checked"] = _since(began)
            return TransferSent(refused=refused | others, ms=ms, nbytes=sent)
        except BaseException:
            self._leave()
            raise

    def _memory_of(self, layout: OfferLayout) -> FlatMemory:
        """The trainer's memory. To wrap hundreds of tensors takes longer than to compare where they lie."""
        if self._opened is None or self._opened[0] != layout:
            self._opened = None
            self._memory.begin(layout)
            pieces = [self._memory.tensor(each).reshape(-1).view(torch.uint8) for each in layout.tensors]
            self._opened = layout, FlatMemory(pieces)
        return self._opened[1]

    def _joined(self, order: Send, joining: WaitLimit, waiting: WaitLimit) -> tuple[Go, dict[str, str]]:
        """Be in the lanes of this transfer. Returns who is, and why others are not."""
        transfer, name = order.transfer, sender_name(order.number)
        if order.number:
            self._member.connect(transfer, joining)
            ready = Ready(group=self._member.number, streams=MOST_STREAMS)
            say(self._member.store, key(transfer.name, "ready", name), ready)
            go, others = hear(self._member.store, key(transfer.name, "go"), Go, waiting), dict[str, str]()
            if go.refused:
                raise TransferError(go.refused)
        else:
            if self._own_store is None:
                raise TransferError("its process has ended, and another one has begun")
            self._member.store = self._own_store
            try:
                go, others = self._gather(order, joining, waiting)
            except TransferError as error:
                say(self._member.store, key(transfer.name, "go"), Go(refused=str(error)))  # receivers wait for no more
                raise
        self._member.follow(go, name, transfer, waiting)
        return go, others

    def _gather(self, order: Send, joining: WaitLimit, waiting: WaitLimit) -> tuple[Go, dict[str, str]]:
        """Wait for all, decide, and write each member's script where the lanes are new."""
        transfer, table = order.transfer, order.table
        if table is None:
            raise TransferError("it was not told what is sent")
        senders = {sender_name(each): self._said(transfer, sender_name(each), joining, waiting)
                   for each in range(1, transfer.senders)}  # fmt: skip
        receivers = {each: self._said(transfer, each, joining, waiting) for each in transfer.receivers}
        go = decide_lanes(senders, receivers, self._standing, table, transfer.backend, self._numbered)
        if go.refused:
            raise TransferError(go.refused)
        if self._standing is None or go.group != self._standing.number:
            self._plan(go, table, transfer)
            self._numbered = go.group
            self._standing = StandingLanes(
                number=go.group, receivers=go.receivers, table=table, backend=transfer.backend
            )
        say(self._member.store, key(transfer.name, "go"), go)
        return go, {name: why_absent(each) for name, each in receivers.items() if name not in go.receivers}

    def _said(self, transfer: GroupTransfer, name: str, joining: WaitLimit, waiting: WaitLimit) -> Ready | None:
        try:
            return hear(self._member.store, key(transfer.name, "ready", name), Ready, joining)
        except TransferError:
            waiting.left()  # raises where all is over, and not only the time to join
            return None

    def _plan(self, go: Go, table: ShardTable, transfer: GroupTransfer) -> None:
        places, _ = side_by_side(table.sizes)
        needs = {name: table.needs.get(name, everything(table.sizes)) for name in go.receivers}
        plan = schedule(table.held, places, needs, BLOCK_BYTES[transfer.backend])
        for member in (*(sender_name(each) for each in range(transfer.senders)), *go.receivers):
            say(self._member.store, key(f"lanes {go.group}", "script", member), script_of(plan, member))

    def _done(self, transfer: GroupTransfer, name: str, waiting: WaitLimit) -> str:
        try:
            return hear(self._member.store, key(transfer.name, "done", name), Done, waiting).refused
        except TransferError as error:
            self._leave()
            return f"it does not say what has arrived: {error}"

    def _leave(self) -> None:
        self._standing = None
        self._member.leave()


class StagedTensors:
    """Memory for the tensors of an offer, in one piece. `tensors` are views of it, by name; where the receiver keeps
    slices alone, they lie in each other's gaps, and only what it needs of them is of use.
    """

    def __init__(self, offered: Sequence[OfferedTensor], places: PackedPlaces, owner: str, *, on_device: bool) -> None:
        """Allocate it. `owner`: the receiver's name in the transfer, which no other rank has. Files of a process that
        had it before, and was killed, are removed. `on_device`: on the GPU, where there is room. Raises OSError: there
        is no room in /dev/shm.
        """
        self.specs = tuple((each.name, each.dtype, each.shape) for each in offered)
        self.places = places
        layout = places.packed
        self._shared: SharedTensors | None = None
        self._pinned: PinnedMemory | None = None
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

    def fingerprints(self) -> list[int] | None:
        """Those of all tensors, where they are in host memory that the GPU reads; else None."""
        return None if self._pinned is None else self._pinned.fingerprints(list(self.tensors.values()))

    def close(self) -> None:
        """Give it back. Nothing else may refer to its tensors."""
        self.tensors, self.flat = {}, None
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
        self._lanes, self._needs = LaneMember(), KnownNeeds()
        self._known: Offer | None = None
        self._staged: StagedTensors | None = None
        self._kept: tuple[object, str] | None = None
        self._layouts = LayoutCache()
        self._exported: ExportedTensors | None = None

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
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
        self._lanes.connect(transfer, waiting)
        store = self._lanes.store
        try:
            staged = self._stage(offer, order)
        except _REFUSALS as error:
            say(store, key(transfer.name, "ready", order.name), Ready(refused=f"{error}"))
            raise
        ready = Ready(group=self._lanes.number, streams=MOST_STREAMS)
        say(store, key(transfer.name, "ready", order.name), ready)
        go = hear(store, key(transfer.name, "go"), Go, waiting)
        self._follow(go, order.name, transfer, waiting)
        ms["join"] = _since(began)
        began = time.perf_counter()
        try:
            memory = FlatMemory([staged.flat])
            self._lanes.run(memory, transfer.backend, waiting, sends=False, places=staged.places)
            ms["receive"] = _since(began)
            began = time.perf_counter()
            exported = self._prove(offer, staged, order, secret)
        except BaseException as error:
            self._lanes.leave()
            say(store, key(transfer.name, "done", order.name), Done(refused=f"{error}"))
            raise
        ms["prove"] = _since(began)
        say(store, key(transfer.name, "done", order.name), Done())
        self._exported = exported
        return Received(offer=exported.path.name, ms=ms)

    def _stage(self, offer: Offer, order: Receive) -> StagedTensors:
        """Memory that the rank does not read. Raises TransferError: it still copies the transfer before, or it is not
        known what it needs.
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
        """Be a member of the lanes. Raises TransferError: nothing is sent, or this one has no part in it."""
        if go.refused:
            raise TransferError(f"nothing is sent: {go.refused}")
        if name not in go.receivers:
            raise TransferError("the sender has begun without this rank, which was not ready in time")
        self._lanes.follow(go, name, transfer, waiting)

    def _prove(self, offer: Offer, staged: StagedTensors, order: Receive, secret: bytes) -> ExportedTensors:
        """Hold what has arrived against the trainer's fingerprints, and offer it. Raises TransferError: it is something
        else.
        """
        prepared = self._layouts.prepare(staged.tensors, [NO_RULE] * len(staged.tensors))
        if order.needs:
            prove_needed(offer, staged.tensors, order.needs, self._needs.of(order, offer))
        else:
            found = staged.fingerprints() or [each.fingerprint for each in prepared.scan()]
            for tensor, mine, announced in zip(offer.layout.tensors, found, offer.fingerprints, strict=True):
                check_arrived(tensor.name, mine, announced)
        return ExportedTensors(Path(order.folder), prepared.offer(offer.version, offer.fingerprints), secret)


def _since(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 2)


_ROLES = {"send": SenderProcess, "receive": ReceiverProcess, "join": MemberProcess}

if __name__ == "__main__":
    process = _ROLES[sys.argv[1]]()
    serve(Connection(int(sys.argv[2])), process.work, process.end)
