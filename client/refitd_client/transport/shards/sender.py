"""What a sender process does for one of several trainer ranks: it sends its rank's shards, and nothing of the others'.

The first one has the store, plans, and collects what the receivers say. The others follow it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from refitd_client.contract.decoding import from_json
from refitd_client.files.plain_file import read_plain
from refitd_client.transport.group.child import SendShard, TransferSent
from refitd_client.transport.group.membership import TransferError, WaitLimit, hear, join_store, say
from refitd_client.transport.group.transfer import BLOCK_BYTES, MOST_STREAMS, Done, Go, Ready, key, why_absent
from refitd_client.transport.ipc.exported_memory import ImportedMemory
from refitd_client.transport.ipc.offer import GroupTransfer, side_by_side
from refitd_client.transport.shards.lanes import LaneMember
from refitd_client.transport.shards.schedule import everything, schedule
from refitd_client.transport.shards.script import (
    ShardTable,
    StandingLanes,
    decide_lanes,
    script_of,
    sender_name,
)

_MOST_TABLE = 2**30  # bytes of a file that the trainer wrote for this process


class ShardSending:
    """The transfers of one sender process. Not for several threads at a time."""

    def __init__(self) -> None:
        self._memory, self._member = ImportedMemory(), LaneMember()
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._standing: StandingLanes | None = None
        self._numbered = 0

    def send(self, order: SendShard, store: Any, stopped: Callable[[], bool]) -> TransferSent:
        """Send this rank's shards.

        Args:
            order: what to send, and to whom.
            store: this process's, where it has one.
            stopped: whether the wait is not wanted any more.

        Raises:
            TransferError: nothing has arrived, or it is not known what has.
        """
        waiting = WaitLimit(order.within, stopped)
        joining = WaitLimit(min(order.join, order.within), stopped)
        memory, ms, began = self._opened(order), dict[str, float](), time.perf_counter()
        try:
            go, others = self._joined(order, store, joining, waiting)
            ms["join"] = _since(began)
            began = time.perf_counter()
            sent = self._member.run(memory, order.transfer.backend, waiting, sends=True)
            ms["send"] = _since(began)
            if order.number:
                return TransferSent(refused={}, ms=ms, nbytes=sent)
            began = time.perf_counter()
            refused = {name: self._done(order.transfer, name, waiting) for name in go.ranks}
            ms["checked"] = _since(began)
            return TransferSent(refused=refused | dict(others), ms=ms, nbytes=sent)
        except BaseException:
            self._leave()
            raise

    def _opened(self, order: SendShard) -> torch.Tensor:
        self._memory.begin(order.layout)
        (only,) = order.layout.tensors
        return self._memory.tensor(only)

    def _joined(
        self, order: SendShard, store: Any, joining: WaitLimit, waiting: WaitLimit
    ) -> tuple[Go, Mapping[str, str]]:
        """Be in the lanes of this transfer. Returns who is, and why others are not."""
        transfer, name = order.transfer, sender_name(order.number)
        if order.number:
            self._connect(transfer, joining)
            ready = Ready(group=self._member.number, streams=MOST_STREAMS)
            say(self._store, key(transfer.name, "ready", name), ready)
            go, others = hear(self._store, key(transfer.name, "go"), Go, waiting), dict[str, str]()
            if go.refused:
                raise TransferError(go.refused)
        else:
            if store is None:
                raise TransferError("its process has ended, and another one has begun")
            self._store = store
            try:
                go, others = self._gather(order, joining, waiting)
            except TransferError as error:
                say(self._store, key(transfer.name, "go"), Go(refused=str(error)))  # receivers wait for no more
                raise
        self._member.follow(go, name, transfer.backend, self._store, transfer.host, waiting)
        return go, others

    def _connect(self, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        """Connect to the first sender's store. Another one has no lanes of ours."""
        if self._address != (address := (transfer.host, transfer.port)):
            self._leave()
            self._address, self._store = None, join_store(*address, waiting)
            self._address = address

    def _gather(self, order: SendShard, joining: WaitLimit, waiting: WaitLimit) -> tuple[Go, Mapping[str, str]]:
        """Wait for all, decide, and write each member's script where the lanes are new."""
        transfer = order.transfer
        table = read_plain(Path(order.table), _MOST_TABLE)
        named = xxhash.xxh3_128_hexdigest(table)
        senders = {sender_name(each): self._said(transfer, sender_name(each), joining, waiting)
                   for each in range(1, transfer.senders)}  # fmt: skip
        receivers = {each: self._said(transfer, each, joining, waiting) for each in transfer.receivers}
        go = decide_lanes(senders, receivers, self._standing, named, transfer.backend, self._numbered)
        if not go.refused and (self._standing is None or go.group != self._standing.number):
            self._plan(go, table, transfer)
            self._numbered = go.group
            self._standing = StandingLanes(
                number=go.group, receivers=frozenset(go.ranks), table=named, backend=transfer.backend
            )
        say(self._store, key(transfer.name, "go"), go)
        if go.refused:
            raise TransferError(go.refused)
        return go, {name: why_absent(each) for name, each in receivers.items() if name not in go.ranks}

    def _said(self, transfer: GroupTransfer, name: str, joining: WaitLimit, waiting: WaitLimit) -> Ready | None:
        try:
            return hear(self._store, key(transfer.name, "ready", name), Ready, joining)
        except TransferError:
            waiting.left()  # raises where all is over, and not only the time to join
            return None

    def _plan(self, go: Go, table: bytes, transfer: GroupTransfer) -> None:
        known = from_json(table, ShardTable)
        places, _ = side_by_side(known.sizes)
        whole = everything(known.sizes)
        needs = {name: whole if (some := known.needed(name)) is None else some for name in go.ranks}
        plan = schedule(known.strips(), places, needs, BLOCK_BYTES[transfer.backend])
        for member in (*(sender_name(each) for each in range(transfer.senders)), *go.ranks):
            say(self._store, key(f"lanes {go.group}", "script", member), script_of(plan, member))

    def _done(self, transfer: GroupTransfer, name: str, waiting: WaitLimit) -> str:
        try:
            return hear(self._store, key(transfer.name, "done", name), Done, waiting).refused
        except TransferError as error:
            self._leave()
            return f"it does not say what has arrived: {error}"

    def _leave(self) -> None:
        self._standing = None
        self._member.leave()


def _since(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 2)
