"""Transfers from several senders over real Gloo lanes, with members that are killed, silent or wrong: no rank holds
anything but what was announced or what it held, no wait outlasts its deadline, and the next transfer works.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.fingerprint import fingerprints
from refitd_client.transport import sending
from refitd_client.transport.child import GroupChild, Send, TransferSent
from refitd_client.transport.membership import FlatMemory, LaneMember, TransferError, WaitLimit
from refitd_client.transport.memory import LayoutCache, boot_id, host_name
from refitd_client.transport.needs import PackedPlaces
from refitd_client.transport.offer import GroupTransfer, HostPlace, OfferedTensor, OfferLayout, offer_with
from refitd_client.transport.offer_file import ExportedTensors, read_secret
from refitd_client.transport.processes import SenderProcess
from refitd_client.transport.schedule import HeldStrip, strip
from refitd_client.transport.script import Backend, MemberScript, ShardTable
from refitd_client.transport.sending import Destination, NoTransferError, TensorSender
from support.receiving import NAMES, SECONDS, Receiving, Weights, kill, receiving_processes, refused, root_of_offers

pytestmark = pytest.mark.timeout(600)

SENDERS = 2
ROWS, COLUMNS = 1024, 4096


def weights(seed: int) -> Weights:
    """A matrix of 16 MiB, of which each sender has columns; two parts that are a block each; five short rows."""
    made = torch.Generator().manual_seed(seed)
    return {
        "halves": torch.randint(0, 255, (SENDERS, 5 * 2**20), dtype=torch.uint8, generator=made),
        "columns": torch.randint(0, 2**14, (ROWS, COLUMNS), dtype=torch.int32, generator=made),
        "rows": torch.randint(0, 2**14, (5, 7), dtype=torch.int16, generator=made).view(torch.bfloat16),
    }


SHAPES = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights(0).items()}
DTYPES = {"int32": "I32", "bfloat16": "BF16", "uint8": "U8"}


def table() -> tuple[ShardTable, int]:
    """Who has what: a half; half of the columns each; three rows, and two. And the bytes of a sender."""
    half, row, part = COLUMNS * 4 // 2, 7 * 2, 5 * 2**20
    large = part + half * ROWS
    held = [
        [
            HeldStrip(0, strip(sender * part, part), 0),
            HeldStrip(1, strip(sender * half, half, ROWS, COLUMNS * 4), part),
            HeldStrip(2, strip(3 * row * sender, (3 - sender) * row), large),
        ]
        for sender in range(SENDERS)
    ]
    sizes = tuple(tensor.nbytes for tensor in weights(0).values())
    return ShardTable(sizes=sizes, held=tuple(map(tuple, held))), large + 64


@dataclass
class Shards(Receiving):
    """A trainer of two ranks and two receivers on one root."""

    senders: list[TensorSender]
    stop: threading.Event = field(default_factory=threading.Event)

    def stage(self, step: int, *, wrong: int | None = None) -> None:
        """Each sender has its part of the weights of a step; sender `wrong` another bit."""
        half, (halves, large, rows) = COLUMNS // 2, weights(step).values()
        for number, sender in enumerate(self.senders):
            memory, at = sender.memory(table()[1], torch.device("cpu")), 0
            columns, own = large[:, number * half : (number + 1) * half], rows[3 * number : 3 * number + 3]
            for part in (halves[number], columns, own):
                data = part.contiguous().view(torch.uint8).reshape(-1)
                memory[at : at + len(data)].copy_(data)
                at += len(data)
            if wrong == number:
                memory[at - 1] ^= 1

    def offer(self, step: int, names: tuple[str, ...] = NAMES) -> tuple[ExportedTensors, GroupTransfer]:
        to = Destination(backend="gloo", receivers=names, service_host="127.0.0.1")
        transfer = self.senders[0].open(to, self.layout(0), SENDERS)
        tensors = tuple(
            OfferedTensor(name, DTYPES[dtype], shape, HostPlace(os.devnull, 0))
            for name, (dtype, shape) in SHAPES.items()
        )
        layout = OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life="", tensors=tensors)
        made = offer_with(layout, f"run~v{step:06d}", fingerprints(weights(step).values()))
        offer = replace(made, transfer=transfer)
        return ExportedTensors(self.root / "run", offer, read_secret(self.root)), transfer

    def send(self, number: int, transfer: GroupTransfer) -> Future[TransferSent]:
        plan = None if number else table()[0]
        send = self.senders[number].send
        return self.pool.submit(send, transfer, self.layout(number), self.stop, number=number, table=plan)

    def layout(self, number: int) -> OfferLayout:
        """Where what a sender has lies."""
        return LayoutCache().prepare({"flat": self.senders[number]._memory}, [NO_RULE]).layout

    def goes(self, step: int, names: tuple[str, ...] = NAMES) -> None:
        """A whole transfer, after which all receivers have exactly the weights of the step."""
        self.stage(step)
        exported, transfer = self.offer(step, names)
        with exported:
            receiving = {name: self.receive(name, exported) for name in names}
            sent = [self.send(number, transfer) for number in range(SENDERS)]
            total = sum(each.result(SECONDS).nbytes for each in sent)
            for name, one in receiving.items():
                self.holds(name, one.result(SECONDS), weights(step))
        assert total == sum(table()[0].sizes) * len(names)  # no sender has sent what another has


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[dict[str, GroupChild], ThreadPoolExecutor, list[TensorSender]]]:
    senders = [TensorSender(Path(f"/test{os.getpid()}"), f"{number}") for number in range(SENDERS)]
    with receiving_processes() as (receivers, pool):
        yield receivers, pool, senders
        for sender in senders:
            sender.close()


@pytest.fixture
def shards(
    processes: tuple[dict[str, GroupChild], ThreadPoolExecutor, list[TensorSender]], tmp_path: Path
) -> Iterator[Shards]:
    with root_of_offers(tmp_path) as root:
        yield Shards(root, *processes)


def pids(shards: Shards) -> list[int | None]:
    return [child.pid for child in shards.receivers.values()] + [
        sender._child.pid for sender in shards.senders if sender._child is not None
    ]


def test_each_sender_sends_its_own_part_alone_and_the_lanes_stay_from_step_to_step(shards: Shards) -> None:
    shards.goes(1)
    before = pids(shards)
    for step in (2, 3):
        shards.goes(step)
    assert pids(shards) == before


def test_one_bit_of_one_sender_is_refused_by_all_and_the_next_transfer_works(shards: Shards) -> None:
    shards.stage(4, wrong=1)
    exported, transfer = shards.offer(4)
    with exported:
        receiving = [shards.receive(name, exported) for name in NAMES]
        first, _ = [shards.send(number, transfer) for number in range(SENDERS)]
        assert all("'rows' has fingerprint" in refused(one) for one in receiving)
        said = first.result(SECONDS)
    assert all("not what the trainer announced" in each for each in said.refused.values())
    shards.goes(5)


@pytest.mark.parametrize("who", [0, 1])
def test_a_sender_that_is_killed_before_it_sends_leaves_no_receiver_with_a_version(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    shards.goes(1)
    shards.stage(2)
    exported, transfer = shards.offer(2)
    with exported, monkeypatch.context() as shorter:
        shorter.setattr(sending, "JOIN_SECONDS", 3.0)
        shorter.setattr(sending, "SEND_SECONDS", 10.0)
        receiving = [shards.receive(name, exported, 10.0) for name in NAMES]
        kill(shards.senders[who]._child)
        sent = [shards.send(number, transfer) for number in range(SENDERS) if number != who]
        assert all(isinstance(each.exception(SECONDS), NoTransferError) for each in sent)
        assert all(refused(one) for one in receiving)
    shards.goes(3)


def test_a_sender_that_is_silent_is_waited_for_until_the_deadline_and_named(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.goes(1)
    shards.stage(2)
    exported, transfer = shards.offer(2)
    with exported, monkeypatch.context() as shorter:
        shorter.setattr(sending, "JOIN_SECONDS", 2.0)
        receiving = [shards.receive(name, exported) for name in NAMES]
        first = shards.send(0, transfer)  # and the other one never begins
        assert "sender 1 was not ready in time" in str(first.exception(SECONDS))
        assert all("nothing is sent: sender 1 was not ready in time" in refused(one) for one in receiving)
    shards.goes(3)


def test_a_sender_that_is_killed_when_all_others_are_ready_ends_the_transfer_on_all_and_no_other(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.goes(1)
    with monkeypatch.context() as shorter:
        shorter.setattr(sending, "JOIN_SECONDS", 3.0)
        shards.stage(2)
        exported, transfer = shards.offer(2)
        with exported:
            receiving = [shards.receive(name, exported) for name in NAMES]
            other = shards.send(1, transfer)
            for name in (*NAMES, "sender 1"):
                shards.says_that_it_is_ready(name, transfer)
            kill(shards.senders[1]._child)
            assert isinstance(other.exception(SECONDS), NoTransferError)
            first = shards.send(0, transfer)  # all have what it sends, and none the rest
            assert all("broadcast has failed" in refused(one) for one in receiving)
            assert all(first.result(SECONDS).refused.values())
    shards.goes(3)


class BreakingOff(LaneMember):
    """Sends its first block, and leaves."""

    def run(
        self,
        memory: FlatMemory,
        backend: Backend,
        waiting: WaitLimit,
        *,
        sends: bool,
        places: PackedPlaces | None = None,
    ) -> int:
        assert len(self._script.blocks) > 1
        self._script = MemberScript(self._script.lanes, self._script.blocks[:1])
        super().run(memory, backend, waiting, sends=sends, places=places)
        raise TransferError("it breaks off")


def test_a_sender_that_breaks_off_in_the_middle_ends_the_transfer_on_all_and_no_other(shards: Shards) -> None:
    shards.stage(2)
    exported, transfer = shards.offer(2)
    with exported:
        receiving = [shards.receive(name, exported) for name in NAMES]
        first = shards.send(0, transfer)
        rogue = SenderProcess()
        rogue._member = BreakingOff()
        order = Send(transfer=transfer, number=1, layout=shards.layout(1), table=None, within=SECONDS, join=SECONDS)
        with pytest.raises(TransferError, match="it breaks off"):
            shards.pool.submit(rogue.send, order, lambda: False).result(SECONDS)
        assert all("broadcast has failed" in refused(one) for one in receiving)
        first.exception(SECONDS)
    shards.goes(3)


def test_a_script_that_leads_out_of_a_members_memory_is_not_followed(shards: Shards) -> None:
    """The table of rank 0 may be of another layout than what a rank has staged."""
    shards.stage(1)
    shards.senders[1].memory(64, torch.device("cpu"))
    exported, transfer = shards.offer(1)
    with exported:
        receiving = [shards.receive(name, exported, 20.0) for name in NAMES]
        sent = [shards.send(number, transfer) for number in range(SENDERS)]
        assert "goes beyond the 64 bytes" in str(sent[1].exception(SECONDS))
        assert all(refused(one) for one in receiving)
        sent[0].exception(SECONDS)
    shards.goes(2)
