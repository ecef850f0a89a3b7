"""Versions sent over a Gloo group to a real SGLang that has no refitd inside, by its own endpoints.

Whatever the sender does, the engine serves what was published, by files at the latest, and answers what it was asked.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from refitd.engine.fingerprints import SENT_PROOF
from refitd.engine.sglang import group_adapter, group_calls, sender_line
from refitd_client import WeightPublisher
from refitd_client.contract.states import EngineState
from refitd_client.errors import TransportRefusedError
from refitd_client.publish.publication import StagedPublication
from refitd_client.transport.group import child
from support import rogue_stock
from support.jobs import RUN, TOKEN, Job, running, served_by
from support.servers import API_KEY, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SECONDS = 120.0
TOKENS = 800
Weights = dict[str, torch.Tensor]


def soon() -> None:
    """What the service does before it starts: shorter deadlines, and several buckets of a small model."""
    group_calls.JOIN_SECONDS = sender_line.JOIN_SECONDS = 5.0
    group_calls.BUCKETS_SECONDS = group_adapter.BUCKETS_SECONDS = 5.0
    rogue_stock.small_buckets()


class StockJob:
    """A trainer, a service and the engine. Publications go on by files and over the group in turn."""

    def __init__(self, job: Job, engine: SglangServer, models: Path, publisher: WeightPublisher) -> None:
        self.job, self.engine, self.publisher = job, engine, publisher
        self.weights = [load_file(models / name / "model.safetensors") for name in ("model_a", "model_b")]
        self.step = 0
        self.answers: list[list[int]] = []
        for _ in self.weights:
            self.publish().wait(SECONDS)
            self.answers.append(served_by(engine).answer)
        assert self.answers[0] != self.answers[1]

    def publish(self, transport: str = "disk") -> StagedPublication:
        """The other weights than before."""
        self.step += 1
        return self.publisher.publish(self.weights[self.step % 2], step=self.step, transport=transport)  # pyright: ignore[reportArgumentType]

    def is_served(self) -> None:
        """The engine serves the last step, and answers as after a load of its files."""
        served = served_by(self.engine)
        assert (served.label, served.answer) == (str(self.step), self.answers[(self.step - 1) % 2])

    def goes(self) -> None:
        """A version is sent, and served before its files are there."""
        publication = self.publish("gloo")
        assert publication.handed is not None
        assert (publication.handed.engines, publication.handed.reason) == ((self.job.engine_now.id,), None)
        self.is_served()
        assert self.job.engine_now.proof == SENT_PROOF
        publication.wait(SECONDS, "sealed")
        self.is_served()


@pytest.fixture(scope="module")
def stock_job(sglang: SglangServer, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[StockJob]:
    if not sglang.is_running:
        sglang.restart()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(child, "PROGRAM", "support.rogue_stock")
        folder = tmp_path_factory.mktemp("stock")
        with (
            running(folder, sglang, "--sglang-stock-transfers", first=soon) as job,
            WeightPublisher(job.root, RUN, job.refitd.url, token=TOKEN) as publisher,
        ):
            yield StockJob(job, sglang, models, publisher)


class InFlight:
    """An answer of some length, begun before an update and read to its end behind it."""

    def __init__(self, engine: SglangServer) -> None:
        self._engine, self.tokens, self.ended = engine, 0, ""
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        prompt = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        headers = {"Authorization": f"Bearer {API_KEY}"}
        with httpx.Client(base_url=self._engine.url, headers=headers, timeout=3 * SECONDS, trust_env=False) as http:
            reply = http.post("/generate", json=prompt).raise_for_status().json()
        self.tokens, self.ended = len(reply["output_ids"]), reply["meta_info"]["finish_reason"]["type"]

    def is_answered(self) -> None:
        """In full, or as far as a repair has let it: one to the label of what was served ends what is under way."""
        self._thread.join(3 * SECONDS)
        assert self.ended == "abort" or self.tokens == TOKENS


def test_what_a_trainer_sends_is_proved_and_served_before_its_files_are_there(stock_job: StockJob) -> None:
    for _ in range(3):
        stock_job.goes()
    sealed = stock_job.job.client.version(f"exp~trial~v{stock_job.step:06d}")
    assert sealed.metadata["transport"] == "gloo"


@pytest.mark.parametrize("fault", ["absent", "forged"])
def test_an_engine_is_untouched_by_a_sender_that_does_not_join_or_is_not_believed_and_goes_on(
    stock_job: StockJob, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = stock_job.job.now
    monkeypatch.setenv(rogue_stock.VARIABLE, fault)
    stock_job.publisher._context.handover.close()
    answer = InFlight(stock_job.engine)
    publication = stock_job.publish("gloo")
    assert publication.handed is not None
    assert publication.handed.engines == ()
    assert publication.handed.reason
    publication.wait(SECONDS)
    stock_job.is_served()
    answer.is_answered()
    states = [e.data.get("state") for e in stock_job.job.events if e.seq > mark and e.kind == "engine"]
    assert EngineState.TAINTED not in states
    monkeypatch.delenv(rogue_stock.VARIABLE)
    stock_job.goes()


@pytest.mark.parametrize("fault", ["silent", "early", "middle", "late", "short", "other"])
def test_a_broken_transfer_is_never_served_and_the_engine_is_repaired_by_files(
    stock_job: StockJob, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, mark = stock_job.job, stock_job.job.now
    monkeypatch.setenv(rogue_stock.VARIABLE, fault)
    stock_job.publisher._context.handover.close()
    answer = InFlight(stock_job.engine)
    publication = stock_job.publish("gloo")
    assert publication.handed is not None
    assert publication.handed.engines == ()
    assert "received over a group" in (publication.handed.reason or "")
    job.until_engine(EngineState.TAINTED, after=mark)
    publication.wait(SECONDS)
    stock_job.is_served()
    answer.is_answered()
    monkeypatch.delenv(rogue_stock.VARIABLE)
    stock_job.goes()


def test_a_version_without_files_is_refused(stock_job: StockJob) -> None:
    job = stock_job.job
    with (
        WeightPublisher(job.root, "exp/other", job.refitd.url, token=TOKEN, durable="never") as publisher,
        pytest.MonkeyPatch.context() as patched,
    ):
        receivers = publisher._receivers
        assert receivers is not None
        patched.setattr(receivers, "_run", RUN)  # which has the engine
        with pytest.raises(TransportRefusedError, match="durable='always'"):
            publisher.publish(stock_job.weights[0], step=1, transport="gloo")


def test_a_service_that_is_killed_in_the_middle_frees_the_engine_and_repairs_it_when_it_is_back(
    stock_job: StockJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, listener = stock_job.job, listening()
    monkeypatch.setenv(rogue_stock.VARIABLE, "silent")
    monkeypatch.setenv(rogue_stock.REPORT_TO, str(listener.getsockname()[1]))
    stock_job.publisher._context.handover.close()
    publishing: list[StagedPublication] = []
    thread = threading.Thread(target=lambda: publishing.append(stock_job.publish("gloo")))
    thread.start()
    with listener:
        listener.accept()[0].close()
    job.refitd.kill()
    job.refitd.restart()
    thread.join(SECONDS)
    publishing[0].wait(SECONDS)
    stock_job.is_served()
    monkeypatch.delenv(rogue_stock.VARIABLE)
    stock_job.goes()


def listening() -> socket.socket:
    """Where a sender that hangs says so."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(SECONDS)
    return listener


TRAINER = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from refitd_client import WeightPublisher
from refitd_client.transport.group import child
child.PROGRAM = "support.rogue_stock"
root, run, url, token, model, step = sys.argv[1:]
with WeightPublisher(Path(root), run, url, token=token) as publisher:
    publisher.publish(load_file(model), step=int(step), transport="gloo")
"""


def test_a_trainer_that_is_killed_in_the_middle_frees_the_engine_which_goes_back_to_the_last_good_version(
    stock_job: StockJob, models: Path
) -> None:
    job, mark = stock_job.job, stock_job.job.now
    stock_job.publisher.close()
    model = models / "model_a" / "model.safetensors"
    words = [str(job.root), RUN, job.refitd.url, TOKEN, str(model), str(stock_job.step + 1)]
    listener = listening()
    environment = {
        "PYTHONPATH": str(Path(rogue_stock.__file__).parents[1]),  # its sender is one of the tests' modules
        rogue_stock.VARIABLE: "silent",
        rogue_stock.REPORT_TO: str(listener.getsockname()[1]),
    }
    with subprocess.Popen([sys.executable, "-c", TRAINER, *words], env=dict(os.environ) | environment) as trainer:
        with listener:
            listener.accept()[0].close()
        trainer.send_signal(signal.SIGKILL)
    tainted = job.until_engine(EngineState.TAINTED, after=mark)
    job.until_engine(EngineState.IN_SYNC, after=tainted.seq)
    stock_job.is_served()
