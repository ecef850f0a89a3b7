"""What a sender process does: it opens the trainer's tensors as an engine on the host would, and broadcasts them.

While it reads them it holds the offer's lock, so that the trainer knows when they are its own again, also where this
process is killed. It has the store, and the group of the last transfer.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from refitd_client.transport.group.child import Open, Opened, Order, OrderFailed, Reply, Send, SendShard, TransferSent
from refitd_client.transport.group.membership import BroadcastGroup, TransferError, WaitLimit, hear, open_store, say
from refitd_client.transport.group.transfer import (
    BLOCK_BYTES,
    IN_FLIGHT,
    SENDER,
    Done,
    FlatLayout,
    Ready,
    StandingGroup,
    decide,
    flat_layout,
    key,
    why_absent,
)
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.exported_memory import ImportedMemory
from refitd_client.transport.ipc.offer import GroupTransfer, HostPlace, Offer, OfferRefusedError
from refitd_client.transport.ipc.offer_file import HandoverKeyRefusedError, ImportedTensors, read_secret
from refitd_client.transport.shards.sender import ShardSending

_SENDER_REFUSALS = (TransferError, OfferRefusedError, HandoverKeyRefusedError, DriverError, OSError, ValueError)


class SenderProcess:
    """The work of a sender process. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._store: Any = None
        self._host = ""
        self._memory = ImportedMemory()
        self._group: BroadcastGroup | None = None
        self._standing: StandingGroup | None = None
        self._numbered = 0
        self._offer: Offer | None = None
        self._ring: list[torch.Tensor] = []
        self._shards = ShardSending()

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        """Carry out one order."""
        try:
            match order:
                case Open(host):
                    self._store, port = open_store(host)
                    self._host = host
                    return Opened(port)
                case Send():
                    return self._send(order, stopped)
                case SendShard():
                    return self._shards.send(order, self._store, stopped)
                case _:
                    return OrderFailed("it is a sender, and receives nothing")
        except _SENDER_REFUSALS as error:
            return OrderFailed(str(error) or type(error).__name__)

    def end(self) -> None:
        """Nothing of it outlives the process."""

    def _send(self, order: Send, stopped: Callable[[], bool]) -> TransferSent:
        root, ms, began = Path(order.root), dict[str, float](), time.perf_counter()
        imported = ImportedTensors(root / order.offer, read_secret(root), self._offer)
        try:
            offer = self._offer = imported.offer
            transfer, waiting = offer.transfer, WaitLimit(order.within, stopped)
            if transfer is None:
                raise TransferError("the offer is of no transfer")
            if self._store is None:
                raise TransferError("its process has ended, and another one has begun")
            go, said = self._gather(transfer, WaitLimit(min(order.join, order.within), stopped), waiting)
            ms["join"] = _since(began)
            imported.hold()
            group = self._group
            if group is None:  # not where `decide` has refused
                raise TransferError("there is no group")
            began = time.perf_counter()
            try:
                group.broadcast(self._blocks(offer, transfer), waiting)
            except BaseException:
                self._leave()
                raise
            finally:
                imported.release()
            ms["send"] = _since(began)
        finally:
            imported.close()
        began = time.perf_counter()
        refused = {name: self._done(transfer, name, waiting) for name in go}
        ms["checked"] = _since(began)
        nbytes = sum(each.nbytes for each in offer.layout.tensors) * len(go)
        return TransferSent(refused=refused | said, ms=ms, nbytes=nbytes)

    def _gather(
        self, transfer: GroupTransfer, joining: WaitLimit, waiting: WaitLimit
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Wait for the receivers, and make their group unless it stands.

        Returns:
            The ranks of those that take part, and why the others do not.
        """
        said: dict[str, Ready | None] = dict.fromkeys(transfer.receivers)
        for name in transfer.receivers:
            try:
                said[name] = hear(self._store, key(transfer.name, "ready", name), Ready, joining)
            except TransferError:
                waiting.left()  # raises where all is over, and not only the time to join
        go = decide(said, self._standing, self._numbered)
        say(self._store, key(transfer.name, "go"), go)
        if go.refused:
            raise TransferError(go.refused)
        if self._standing is None or go.group != self._standing.number:
            self._leave()
            self._numbered = go.group
            self._group = BroadcastGroup(transfer.backend, self._store, go, SENDER, self._host, waiting)
            self._standing = StandingGroup(number=go.group, ranks=go.ranks)
        others = {name: why_absent(each) for name, each in said.items() if name not in go.ranks}
        return go.ranks, others

    def _done(self, transfer: GroupTransfer, name: str, waiting: WaitLimit) -> str:
        try:
            return hear(self._store, key(transfer.name, "done", name), Done, waiting).refused
        except TransferError as error:
            self._leave()
            return f"it does not say what has arrived: {error}"

    def _leave(self) -> None:
        group, self._group, self._standing = self._group, None, None
        if group is not None:
            group.close()

    def _blocks(self, offer: Offer, transfer: GroupTransfer) -> Iterator[torch.Tensor]:
        """The blocks, each filled when it is asked for."""
        layout, tensors = flat_layout(offer.layout.tensors), self._memory.tensors(offer)
        bounds = layout.blocks(BLOCK_BYTES[transfer.backend])
        flat = None if transfer.backend == "nccl" else _flat(offer, layout, tensors)
        if flat is not None:
            yield from (flat[begin:end] for begin, end in bounds)
            return
        views = [_bytes_of(tensors[each.name]) for each in offer.layout.tensors]
        for number, (begin, end) in enumerate(bounds):
            block = self._block(number, transfer)[: end - begin]
            for piece in layout.pieces(begin, end):
                block[piece.offset : piece.offset + piece.size].copy_(
                    views[piece.tensor][piece.begin : piece.begin + piece.size]
                )
            yield block

    def _block(self, number: int, transfer: GroupTransfer) -> torch.Tensor:
        """Memory for a block, which is used again when the broadcast of it has ended."""
        device = torch.device("cuda" if transfer.backend == "nccl" else "cpu")
        if not self._ring or self._ring[0].device.type != device.type:
            size, pinned = BLOCK_BYTES[transfer.backend], device.type == "cpu" and torch.cuda.is_available()
            self._ring = [
                torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
                for _ in range(IN_FLIGHT[transfer.backend] + 1)
            ]
        return self._ring[number % len(self._ring)]


def _flat(offer: Offer, layout: FlatLayout, tensors: dict[str, Any]) -> torch.Tensor | None:
    """All tensors as one piece of memory, where they lie so in one file; else None."""
    paths: set[str] = set()
    for each, at, size in zip(offer.layout.tensors, layout.offsets, layout.sizes, strict=True):
        if not isinstance(each.place, HostPlace) or (size and each.place.offset != at):
            return None
        paths |= {each.place.path} if size else set()
    if len(paths) != 1:
        return None
    first = next(number for number, size in enumerate(layout.sizes) if size)
    storage: Any = tensors[offer.layout.tensors[first].name].untyped_storage()
    if storage.nbytes() < layout.nbytes:
        return None
    whole: Any = torch.empty(0, dtype=torch.uint8)
    return whole.set_(storage, 0, (layout.nbytes,))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _since(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 2)
