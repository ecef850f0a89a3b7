"""Transfers over a real Gloo group, with processes that are killed, silent, late or wrong: no rank holds anything but
what was announced or what it held, no wait outlasts its deadline, and the next transfer works.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.transport import sending
from refitd_client.transport.child import ChildLostError, GroupChild, Reply, TransferSent
from refitd_client.transport.membership import BroadcastGroup, TransferError, WaitLimit, hear, open_store, say
from refitd_client.transport.memory import PREFIX, SHARED_MEMORY, LayoutCache, PreparedOffer
from refitd_client.transport.offer import GroupTransfer, side_by_side
from refitd_client.transport.offer_file import ExportedTensors, ImportedTensors, read_secret
from refitd_client.transport.schedule import everything, schedule
from refitd_client.transport.script import (
    BLOCK_BYTES,
    MOST_LANES,
    SENDER,
    Done,
    Go,
    Ready,
    key,
    script_of,
    table_of_whole,
)
from refitd_client.transport.sending import Destination, NoTransferError, TensorSender
from support.broadcasting import broadcast
from support.receiving import (
    NAMES,
    SECONDS,
    A,
    B,
    Receiving,
    Weights,
    kill,
    receiving_processes,
    refused,
    root_of_offers,
)

pytestmark = pytest.mark.timeout(300)


def weights(seed: int) -> Weights:
    """40 MiB, which is more than a block, and no NaN."""
    made = torch.Generator().manual_seed(seed)
    large = torch.randint(0, 2**14, (20 * 2**20,), dtype=torch.int16, generator=made)
    return {"large": large.view(torch.bfloat16), "odd": torch.full((3,), float(seed))}


@dataclass
class Transfers(Receiving):
    """A trainer and two receivers on one root."""

    sender: TensorSender
    layouts: LayoutCache = field(default_factory=LayoutCache)
    prepared: PreparedOffer | None = None
    transfer: GroupTransfer | None = None

    def offer(self, step: int, names: tuple[str, ...] = NAMES, at: tuple[str, int] | None = None) -> ExportedTensors:
        """Offer the weights of a step; `at` is another sender's store."""
        tensors = self.sender.sharable(weights(step))
        self.prepared = self.layouts.prepare(tensors, [NO_RULE] * len(tensors))
        found = [each.fingerprint for each in self.prepared.scan()]
        to = Destination(backend="gloo", receivers=names, service_host="127.0.0.1")
        self.transfer = transfer = (
            self.sender.open(to, self.prepared.layout)
            if at is None
            else GroupTransfer(name=secrets.token_hex(4), backend="gloo", host=at[0], port=at[1], receivers=names)
        )
        offer = replace(self.prepared.offer(f"run~v{step:06d}", found), transfer=transfer)
        return ExportedTensors(self.root / "run", offer, read_secret(self.root))

    def send(self) -> TransferSent:
        """Send what was offered last."""
        assert self.prepared is not None
        assert self.transfer is not None
        return self.sender.send(self.transfer, self.prepared.layout, threading.Event(), table=TABLE)

    def goes(self, step: int, names: tuple[str, ...] = NAMES) -> None:
        """A whole transfer, after which all receivers have exactly the weights of the step."""
        with self.offer(step, names) as exported:
            under_way = [self.receive(name, exported) for name in names]
            assert self.send().refused == dict.fromkeys(names, "")
            for name, one in zip(names, under_way, strict=True):
                self.holds(name, one.result(SECONDS), weights(step))


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[dict[str, GroupChild], ThreadPoolExecutor, TensorSender]]:
    sender = TensorSender(Path(f"/test{os.getpid()}"), "process")
    with receiving_processes() as (receivers, pool):
        yield receivers, pool, sender
        sender.close()


@pytest.fixture
def transfers(
    processes: tuple[dict[str, GroupChild], ThreadPoolExecutor, TensorSender], tmp_path: Path
) -> Iterator[Transfers]:
    with root_of_offers(tmp_path) as root:
        yield Transfers(root, *processes)


def gave_up(one: "Future[Reply]") -> None:
    """A receiver has said that its time is over, or was ended at its deadline."""
    assert isinstance(one.exception(SECONDS), ChildLostError) or "time" in refused(one) or "failed" in refused(one)


def test_a_member_that_comes_or_goes_is_in_the_next_transfer_or_is_not(transfers: Transfers) -> None:
    transfers.goes(1, (A,))
    transfers.goes(2, (A, B))
    transfers.goes(3, (B,))


def test_a_receiver_that_is_killed_is_begun_again_for_the_next_transfer(transfers: Transfers) -> None:
    transfers.goes(1)
    kill(transfers.receivers[B])
    transfers.goes(2)
    assert len(list(SHARED_MEMORY.glob(f"{PREFIX}{B}-*"))) == 1  # what the killed one has left is removed


def test_a_receiver_that_is_killed_when_it_was_ready_ends_this_transfer_and_no_other(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers.goes(1)
    with transfers.offer(2) as exported, monkeypatch.context() as shorter:
        shorter.setattr(sending, "SEND_SECONDS", 10.0)  # what a group of which a member is gone waits for
        lost = transfers.receive(B, exported)
        assert transfers.transfer is not None
        transfers.says_that_it_is_ready(B, transfers.transfer)
        kill(transfers.receivers[B])
        assert isinstance(lost.exception(SECONDS), ChildLostError)
        first = transfers.receive(A, exported)
        with pytest.raises(NoTransferError):
            transfers.send()
        # It had said that it was ready, so that the group is not made, or is broken in the broadcast; a sender that
        # hangs in either is ended at its deadline, and its store with it.
        assert any(part in refused(first) for part in ("broadcast has failed", "was not made", "store is gone"))
    transfers.goes(3)


def test_a_sender_that_is_killed_leaves_receivers_that_refuse_and_the_next_one_sends(transfers: Transfers) -> None:
    transfers.goes(1)
    with transfers.offer(2) as exported:
        under_way = [transfers.receive(name, exported) for name in NAMES]
        kill(transfers.sender._child)
        assert all("store" in refused(one) for one in under_way)
        with pytest.raises(NoTransferError, match=r"has ended|cannot be used"):
            transfers.send()
    transfers.goes(3)


def test_a_trainer_that_never_joins_is_waited_for_until_the_deadline_and_no_longer(transfers: Transfers) -> None:
    with transfers.offer(1) as exported:
        gave_up(transfers.receive(A, exported, within=2.0))
    transfers.goes(2, (A,))


class Rogue:
    """A sender in this process that says and sends what a test wants."""

    def __init__(self) -> None:
        self.store, self.port = open_store("127.0.0.1")

    @property
    def at(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def gather(self, exported: ExportedTensors, root: Path) -> tuple[BroadcastGroup, GroupTransfer, WaitLimit]:
        """Make a lane with receiver `a`."""
        imported = ImportedTensors(exported.path, read_secret(root))
        transfer = imported.offer.transfer
        imported.close()
        assert transfer is not None
        waiting = WaitLimit(SECONDS, lambda: False)
        hear(self.store, key(transfer.name, "ready", A), Ready, waiting)
        plan = schedule(TABLE.held, side_by_side(TABLE.sizes)[0], {A: everything(TABLE.sizes)}, BLOCK_BYTES["gloo"])
        say(self.store, key("lanes 1", "script", A), script_of(plan, A))
        say(self.store, key(transfer.name, "go"), Go(group=1, receivers=(A,)))
        return BroadcastGroup("gloo", self.store, MOST_LANES, SENDER, 2, "127.0.0.1", 1, waiting), transfer, waiting


TABLE = table_of_whole([tensor.nbytes for tensor in weights(0).values()])


def blocks(step: int) -> list[torch.Tensor]:
    """What an honest sender sends."""
    large, odd = (tensor.view(torch.uint8).clone() for tensor in weights(step).values())
    return [*large.split(BLOCK_BYTES["gloo"]), odd]


def other_bytes(sent: list[torch.Tensor]) -> list[torch.Tensor]:
    sent[1][5] ^= 1
    return sent


def test_an_honest_rogue_is_believed(transfers: Transfers) -> None:
    """Else the refusals below would prove nothing."""
    rogue = Rogue()
    with transfers.offer(1, (A,), rogue.at) as exported:
        one = transfers.receive(A, exported)
        group, transfer, waiting = rogue.gather(exported, transfers.root)
        broadcast(group, blocks(1), waiting)
        assert hear(rogue.store, key(transfer.name, "done", A), Done, waiting) == Done()
        transfers.holds(A, one.result(SECONDS), weights(1))


@pytest.mark.parametrize(
    "changed",
    [other_bytes, lambda sent: blocks(2)],
    ids=["one bit", "the bytes of another version"],
)
def test_bytes_that_were_not_announced_are_refused(
    transfers: Transfers, changed: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    rogue = Rogue()
    with transfers.offer(1, (A,), rogue.at) as exported:
        one = transfers.receive(A, exported)
        group, transfer, waiting = rogue.gather(exported, transfers.root)
        broadcast(group, changed(blocks(1)), waiting)
        assert (
            "not what the trainer announced" in hear(rogue.store, key(transfer.name, "done", A), Done, waiting).refused
        )
        assert "not what the trainer announced" in refused(one)
    transfers.goes(2)


@pytest.mark.parametrize("sent", [0, 1])
def test_a_sender_that_breaks_off_is_refused(transfers: Transfers, sent: int) -> None:
    rogue = Rogue()
    with transfers.offer(1, (A,), rogue.at) as exported:
        one = transfers.receive(A, exported)
        group, _, waiting = rogue.gather(exported, transfers.root)
        broadcast(group, blocks(1)[:sent], waiting)
        group.close()
        assert "a broadcast has failed" in refused(one)
    transfers.goes(2)


def test_a_sender_that_sends_too_little_in_a_block_is_refused(transfers: Transfers) -> None:
    """A real engine that receives by itself has answered "Succeeded" to that."""
    rogue = Rogue()
    with transfers.offer(7, (A,), rogue.at) as exported:  # what no test before has left in the receiver's memory
        one = transfers.receive(A, exported)
        group, _, waiting = rogue.gather(exported, transfers.root)
        with suppress(TransferError):
            broadcast(group, [block[:100] for block in blocks(7)], waiting)
        group.close()
        assert "broadcast has failed" in refused(one) or "not what the trainer announced" in refused(one)
    transfers.goes(2)


def test_a_sender_that_has_joined_and_is_silent_holds_up_a_receiver_until_its_deadline(transfers: Transfers) -> None:
    rogue = Rogue()
    with transfers.offer(1, (A,), rogue.at) as exported:
        one = transfers.receive(A, exported, within=6.0)
        group, _, _ = rogue.gather(exported, transfers.root)
        gave_up(one)
        group.close()
    transfers.goes(2)


def test_a_receiver_that_is_late_is_left_out_and_told_so(transfers: Transfers) -> None:
    transfers.goes(1, (A,))
    rogue = Rogue()
    with transfers.offer(2, (A, B), rogue.at) as exported:
        first = transfers.receive(A, exported)
        group, transfer, waiting = rogue.gather(exported, transfers.root)
        late = transfers.receive(B, exported)
        broadcast(group, blocks(2), waiting)
        transfers.holds(A, first.result(SECONDS), weights(2))
        assert "begun without this rank" in refused(late)
        assert hear(rogue.store, key(transfer.name, "done", A), Done, waiting) == Done()


def test_the_processes_end_with_their_parent(transfers: Transfers) -> None:
    transfers.goes(1)
    for child in transfers.receivers.values():
        line = child._line
        assert line is not None
        line.close()  # as the kernel does when the parent dies
    deadline = time.monotonic() + SECONDS
    while any(child.is_running for child in transfers.receivers.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not list((transfers.root / ".refitd" / "receivers").glob("*/.offer-*"))
