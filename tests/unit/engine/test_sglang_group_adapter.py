"""A version over a process group to a stock SGLang: which calls are sent, and what each failure leaves behind.

Both ends of the connection to the sender are real; the engine is scripted.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from refitd.engine.fingerprints import SENT_PROOF
from refitd.engine.port import Offered, Outcome, Reached, Refit, Target, Unreached
from refitd.engine.sglang import group_adapter
from refitd.engine.sglang.group_adapter import SglangGroupEngine
from refitd_client.contract.receivers import StockReceiver
from refitd_client.transport.group.membership import TransferError, WaitLimit
from refitd_client.transport.group.stock_line import ServiceLine, accepted
from refitd_client.transport.group.stock_words import (
    BucketsSent,
    EngineHello,
    EngineOver,
    EngineReady,
    GroupMade,
    StockWelcome,
    code_of,
)
from refitd_client.transport.ipc import exporter
from refitd_client.transport.ipc.offer import HostPlace, OfferedTensor, OfferLayout, StockTransfer, offer_with
from refitd_client.transport.ipc.offer_file import ExportedTensors, make_secret, read_secret
from support.scripted_server import Step, hang_up, silence
from support.scripted_sglang import ScriptedSglang, said, scripted_sglang

VERSION, NAME = "run~v000007", "of-this-transfer"
INIT, BEGIN, BUCKET, END = (
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
)
PAUSE, RESUME, GENERATE, LEAVE = (
    "/pause_generation",
    "/continue_generation",
    "/generate",
    "/destroy_weights_update_group",
)
JOIN = [INIT, PAUSE, BEGIN]


def honest(line: ServiceLine, hello: EngineHello, secret: bytes, waiting: WaitLimit) -> None:
    """What a sender says. The engine is scripted, so that it sends nothing."""
    expected = [{"w": ["other", "sent"]}] * hello.ranks
    line.say(StockWelcome(port=1, group="g", expected=expected, code=code_of(NAME, expected, secret)))
    line.say(GroupMade())
    line.hear(EngineReady, waiting)
    line.say(BucketsSent())
    if refused := line.hear(EngineOver, waiting).refused:
        raise TransferError(refused)


def refuses(line: ServiceLine, hello: EngineHello, secret: bytes, waiting: WaitLimit) -> None:
    line.refuse("it is not known what 'w' is made of")


def forges(line: ServiceLine, hello: EngineHello, secret: bytes, waiting: WaitLimit) -> None:
    expected = [{"w": ["anything"]}]
    line.say(StockWelcome(port=1, group="g", expected=expected, code=code_of("another", expected, secret)))
    line.hear(EngineReady, waiting)


def never_joins(line: ServiceLine, hello: EngineHello, secret: bytes, waiting: WaitLimit) -> None:
    expected = [{"w": ["sent"]}]
    line.say(StockWelcome(port=1, group="g", expected=expected, code=code_of(NAME, expected, secret)))


Part = Callable[[ServiceLine, EngineHello, bytes, WaitLimit], None]


@dataclass
class OneTransfer:
    """An engine, a sender and the offer between them."""

    root: Path
    sglang: ScriptedSglang
    engine: SglangGroupEngine
    ended: list[str] = field(default_factory=list)

    async def refit(self, part: Part = honest, label: str = "7", version: str = VERSION) -> Refit:
        """Bring the engine to a version that a sender which plays a part sends."""
        secret = read_secret(self.root)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            transfer = StockTransfer(name=NAME, backend="gloo", host="127.0.0.1", ports={self.sglang.url: port})
            places = [HostPlace("/somewhere", 0)] * 2
            tensors = (OfferedTensor("a", "BF16", (2, 3), places[0]), OfferedTensor("b", "F32", (4,), places[1]))
            layout = OfferLayout(host="h", boot="b", pid=1, life="l", tensors=tensors)
            offer = replace(offer_with(layout, VERSION, (1, 2)), stock=transfer)
            waiting = WaitLimit(5.0, (over := threading.Event()).is_set)
            thread = threading.Thread(target=self._play, args=(listener, transfer, secret, part, waiting))
            thread.start()
            with ExportedTensors(self.root / "run", offer, secret) as exported:
                offered = Offered(version=version, path="run/v000007", offer=f"run/{exported.path.name}", sent=True)
                target = Target(path="/root/v7", label=label, offered=offered)
                done = await self.engine.refit(target, lambda _: None)
            over.set()  # an engine that was refused the offer never comes
            thread.join(30)
        exporter.end(self.root / "run")
        return done

    def _play(
        self, listener: socket.socket, transfer: StockTransfer, secret: bytes, part: Part, waiting: WaitLimit
    ) -> None:
        try:
            line, hello = accepted(listener, transfer, waiting)
        except TransferError as error:
            self.ended.append(str(error))
            return
        try:
            part(line, hello, secret, waiting)
        except TransferError as error:
            self.ended.append(str(error))
        finally:
            line.close()


@pytest.fixture
def transfer(tmp_path: Path) -> Iterator[OneTransfer]:
    (tmp_path / ".refitd").mkdir()
    (tmp_path / "run").mkdir()
    make_secret(tmp_path)
    with scripted_sglang(told={"device": "cpu"}) as sglang:
        yield OneTransfer(tmp_path, sglang, SglangGroupEngine(sglang.url, root=tmp_path))


async def test_a_version_is_joined_for_while_the_engine_generates_and_proved_before_it_does_again(
    transfer: OneTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_adapter, "buckets", lambda tensors: [[each] for each in tensors])
    done = await transfer.refit()
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    assert (done.proof, done.names) == (SENT_PROOF, "/base")
    assert done.fingerprint is not None
    assert transfer.sglang.changes == [*JOIN, BUCKET, BUCKET, END, RESUME, GENERATE, LEAVE]
    assert transfer.sglang.bodies(INIT) == [
        {
            "master_address": "127.0.0.1",
            "master_port": 1,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
            "backend": "gloo",
        }
    ]
    first, last = transfer.sglang.bodies(BUCKET)
    assert first == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }
    assert (last["names"], last["flush_cache"], last["weight_version"]) == (["b"], True, "7")
    assert transfer.ended == []


async def test_a_release_without_sessions_has_none_and_one_that_was_left_open_is_ended_first(
    transfer: OneTransfer,
) -> None:
    transfer.sglang.version = "0.5.20"
    assert (await transfer.refit()).outcome is Outcome.ACK
    assert not {BEGIN, END} & {*transfer.sglang.calls}
    transfer.engine = SglangGroupEngine(transfer.sglang.url, root=transfer.root)
    transfer.sglang.version = "0.5.23"
    transfer.sglang.on(BEGIN, said(400, "a weight-update session is already open; call end_weight_update() first"))
    assert (await transfer.refit()).outcome is Outcome.ACK
    assert [call for call in transfer.sglang.calls if call in {BEGIN, END}] == [BEGIN, END, BEGIN, END]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (refuses, "not known what 'w'"),
        (forges, "not made with this root's secret"),
    ],
)
async def test_a_sender_that_does_not_go_on_or_is_not_believed_costs_no_pause(
    transfer: OneTransfer, part: Part, reason: str
) -> None:
    done = await transfer.refit(part)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert reason in (done.reason or "")
    assert transfer.sglang.changes == [RESUME]


async def test_an_offer_of_another_version_and_one_to_another_engine_are_refused(transfer: OneTransfer) -> None:
    done = await transfer.refit(version="run~v000008")
    assert (done.outcome, "not of run~v000008" in (done.reason or "")) == (Outcome.NACK, True)
    transfer.engine._http.url = "http://elsewhere"
    done = await transfer.refit()
    assert (done.outcome, "does not send it to this engine" in (done.reason or "")) == (Outcome.NACK, True)


@pytest.mark.parametrize("part", [honest, never_joins])
async def test_where_one_does_not_join_the_sender_is_ended_and_the_engine_goes_on(
    transfer: OneTransfer, part: Part
) -> None:
    if part is honest:
        transfer.sglang.on(INIT, said(400, "Failed to initialize custom process group"))
    done = await transfer.refit(part)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "have not joined" in (done.reason or "")
    assert transfer.sglang.changes == [INIT, GENERATE, RESUME]
    if part is honest:
        assert "the service goes no further" in transfer.ended[0]


async def test_an_engine_that_was_to_join_and_does_not_generate_since_is_unreachable_though_it_answers_a_ping(
    transfer: OneTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_adapter, "ALIVE_SECONDS", 0.2)
    assert isinstance(await transfer.engine.probe(), Reached)
    transfer.sglang.on(INIT, said(400, "no"))
    transfer.sglang.on(GENERATE, silence, silence)
    transfer.sglang.on("/server_info", silence, silence)
    done = await transfer.refit()
    assert (done.outcome, done.resumed) == (Outcome.UNREACHABLE, True)
    seen = await transfer.engine.probe()
    assert isinstance(seen, Unreached)
    assert "does not generate since" in seen.reason
    assert isinstance(await transfer.engine.probe(), Reached)  # it is free


async def test_before_the_first_bucket_the_contents_are_known_and_it_is_resumed(transfer: OneTransfer) -> None:
    transfer.sglang.on(BEGIN, said(400, "no"))
    done = await transfer.refit()
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert transfer.sglang.changes == [*JOIN, RESUME, LEAVE]


@pytest.mark.parametrize("reply", [said(400, "Failed to receive weights: Connection closed by peer"), hang_up])
async def test_from_the_first_bucket_on_a_failure_leaves_it_paused_with_unknown_contents_and_no_strike(
    transfer: OneTransfer, reply: Step
) -> None:
    transfer.sglang.on(BUCKET, reply)
    done = await transfer.refit()
    assert (done.outcome, done.resumed, done.overwritten) == (Outcome.TAINTED, False, True)
    assert "received over a group: bucket 1 of 1" in (done.reason or "")
    assert transfer.sglang.changes == [*JOIN, BUCKET, END, LEAVE]


async def test_what_the_engine_calls_a_success_counts_for_nothing_and_twice_in_a_row_for_never_again(
    transfer: OneTransfer,
) -> None:
    transfer.sglang.received = [{"w": "garbage"}]
    for _ in range(2):
        seen = await transfer.engine.probe()
        assert isinstance(seen, Reached)
        assert seen.stock_receiver == StockReceiver(engine="", url=transfer.sglang.url, ranks=1, device="cpu")
        done = await transfer.refit()
        assert (done.outcome, done.resumed) == (Outcome.TAINTED, False)
        assert "'w' is not what the trainer published" in (done.reason or "")
    assert RESUME not in transfer.sglang.calls
    seen = await transfer.engine.probe()
    assert isinstance(seen, Reached)
    assert seen.stock_receiver is None


async def test_a_server_without_the_route_of_the_checksums_is_asked_once(transfer: OneTransfer) -> None:
    transfer.sglang.on("/weights_checker", said(404, "Not Found"))
    done = await transfer.refit()
    assert (done.outcome, "it gives no checksums" in (done.reason or "")) == (Outcome.NACK, True)
    assert INIT not in transfer.sglang.calls
    seen = await transfer.engine.probe()
    assert isinstance(seen, Reached)
    assert seen.stock_receiver is None


@pytest.mark.parametrize("route", [INIT, BEGIN, BUCKET])
async def test_a_route_that_is_not_there_is_asked_for_once_in_the_life_of_a_server_process(
    transfer: OneTransfer, route: str
) -> None:
    transfer.sglang.told["random_seed"] = 1
    transfer.sglang.on(route, said(404, "Not Found"))
    assert (await transfer.refit()).outcome in {Outcome.NACK, Outcome.TAINTED}
    why = f"it has no {route}, which is answered 404: Not Found"
    before = transfer.sglang.calls.count(route)
    assert why in ((await transfer.refit()).reason or "")
    assert transfer.sglang.calls.count(route) == before
    seen = await transfer.engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.stock_receiver, seen.group_refusal) == (None, why)
    transfer.sglang.told["random_seed"] = 2
    transfer.sglang.served = {"model_path": "/base", "weight_version": "of another start"}
    seen = await transfer.engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.stock_receiver is not None, seen.group_refusal) == (True, None)
    assert (await transfer.refit()).outcome is Outcome.ACK


async def test_a_label_that_is_not_the_versions_is_a_doubt(transfer: OneTransfer) -> None:
    transfer.sglang.on(BUCKET, said(200, "Succeeded to update parameter online."))
    transfer.sglang.ranks = transfer.sglang.received
    done = await transfer.refit()
    assert (done.outcome, "weight_version 'default'" in (done.reason or "")) == (Outcome.TAINTED, True)


async def test_answers_by_another_label_after_the_update_taint_it_and_pause_it_again(transfer: OneTransfer) -> None:
    transfer.sglang.on(GENERATE, said(500, "no"))
    done = await transfer.refit()
    assert (done.outcome, "it holds the version" in (done.reason or "")) == (Outcome.TAINTED, True)
    assert transfer.sglang.changes[-5:] == [RESUME, GENERATE, PAUSE, END, LEAVE]


@pytest.mark.parametrize("told", [{"dp_size": 2}, {"speculative_algorithm": "EAGLE"}, {"version": "0.5.11"}], ids=str)
async def test_a_server_of_which_nothing_could_be_proved_is_no_receiver(
    transfer: OneTransfer, told: dict[str, object]
) -> None:
    transfer.sglang.told |= told
    seen = await transfer.engine.probe()
    assert isinstance(seen, Reached)
    assert seen.stock_receiver is None
    assert (await transfer.refit()).outcome is Outcome.NACK
    assert INIT not in transfer.sglang.calls
