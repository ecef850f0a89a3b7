"""Every broken checkpoint on a real SGLang and a real refitd, under load: all answers are those of good versions.

The server computes in float32: in bfloat16 the two best tokens tie now and then, and which of them wins depends on what
else is in the batch. The checkpoints are in bfloat16 all the same.
"""

import re
import shutil
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from chaos.answers import Claim, Spanning, Wrong, judge
from chaos.book import START_UP, Book, Published
from chaos.load import Load
from chaos.reference import PROMPTS, Reference
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState, VersionState
from support.bad_checkpoints import REASONS, place
from support.jobs import PATIENCE, RUN, Job, running
from support.servers import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(400)]

OTHER = "other"
GOOD = {OTHER: "model_b", START_UP: "model_a"}  # the start-up model comes last: the engine is left on it
ASKERS = ("one", "two")  # each asks in two threads
WAYS = ("found", "noticed", "with a manifest")
MIXED = ("bad_missing", "bad_shape", "bad_nan")  # a server on model_a that is told to load them answers 200
WEIGHTS = "model.safetensors"


@dataclass
class Siege:
    """A service, its engine under load, and what each answer is held against. `view` is where the engine looks."""

    job: Job
    load: Load
    reference: Reference
    models: Path
    view: Path
    book: Book = field(default_factory=Book)
    step: int = 0
    answers: int = 0
    claims: list[Claim] = field(default_factory=list[Claim])

    def serve(self, name: str) -> None:
        """Publish a good model as the next step, and wait until the engine serves it."""
        self.step += 1
        order = Order(1, self.step)
        self.book.add(Published(order, name))
        shutil.copytree(self.models / GOOD[name], self.view_of(self.step))
        self.job.serve(self.models / GOOD[name], self.step)
        for asked in self.load.asked.values():
            asked.floor = order

    def view_of(self, step: int) -> Path:
        """Where the engine sees a step."""
        return self.view / RUN / f"v{step:06d}"

    def swap(self, step: int, model: str) -> None:
        """Have the engine find other weights where it sees a step; one that is reading goes on with the old."""
        fresh = shutil.copy(self.models / model / WEIGHTS, self.view / "fresh")
        fresh.replace(self.view_of(step) / WEIGHTS)

    def place(self, variant: str, way: str) -> str:
        """Put a broken checkpoint into the root, newer than all that is served; its id."""
        self.step += 1
        shutil.copytree(self.models / variant, self.view_of(self.step))
        path = place(self.job.root, RUN, self.step, self.models / variant, manifest=way == "with a manifest")
        if way == "noticed":
            self.job.announce(path, self.step)
        return version_id(RUN, Order(1, self.step))

    def assert_answers(self) -> None:
        """The engine answers now, and each answer since the last time is that of a good version."""
        for name in ASKERS:
            assert self.load.answer_sent_after(name, time.monotonic(), PATIENCE) is not None
        for answer in self.load.take():
            verdict = judge(answer, self.book, self.reference.expected)
            assert not isinstance(verdict, Wrong), (verdict, answer)
            self.answers += 1
            if isinstance(verdict, Spanning):
                self.claims += verdict.claims


@pytest.fixture(scope="module")
def siege(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Siege]:
    """One service, one engine and one load for all of them: what one did, the next would notice."""
    folder = tmp_path_factory.mktemp("siege")
    good, view = folder / "good", folder / "view"
    good.mkdir()
    for name, model in GOOD.items():
        (good / name).symlink_to(models / model)
    flags = ("--path-map", str(view), "--base-model", str(models / "model_a"), "--settle", "0.01")
    with SglangServer(folder, models / "model_a", "--dtype", "float32") as server:
        with Reference(server.url, good) as reference:
            for name in GOOD:
                for prompt in range(len(PROMPTS)):
                    reference.expected(name, prompt)
        with running(folder, server, *flags) as job:
            siege = Siege(job, Load(dict.fromkeys(ASKERS, server.url), "siege"), reference, models, view)
            siege.load.start()
            siege.assert_answers()
            siege.serve(OTHER)
            yield siege
            siege.load.stop()
        # Nobody else is at the engine any more: it says how a version goes on where an update cut an answer in two.
        with Reference(server.url, good) as witness:
            assert [claim for claim in siege.claims if not witness.holds(claim)] == []
        server.kill()  # it would take its time to drain, and holds nothing that anybody needs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", REASONS)
def test_a_bad_checkpoint_is_rejected_by_name_under_load_and_no_answer_is_anything_but_a_good_version_s(
    siege: Siege, variant: str, way: str
) -> None:
    before = siege.job.engine_now
    id_ = siege.place(variant, way)
    siege.job.until(lambda event: event.subject == id_ and event.text.startswith("rejected"))
    version = siege.job.client.version(id_)
    assert version.state is VersionState.REJECTED
    assert re.search(REASONS[variant], version.reason or ""), version.reason
    siege.assert_answers()
    now = siege.job.engine_now
    assert (now.state, now.step, now.last_attempt) == (EngineState.IN_SYNC, before.step, before.last_attempt)


@pytest.mark.parametrize("variant", MIXED)
def test_bad_weights_that_only_the_engine_finds_taint_it_and_no_answer_comes_from_them(
    siege: Siege, variant: str
) -> None:
    """The service cannot see them: its own files are good. The engine loads them, says 200, and stays paused."""
    siege.serve(START_UP)
    mark = siege.job.now
    siege.swap(siege.step, variant)
    siege.job.client.resync(siege.job.engine_now.id)
    tainted = siege.job.until_engine(EngineState.TAINTED, after=mark)
    assert siege.job.engine_now.paused
    siege.swap(siege.step, GOOD[START_UP])
    siege.job.until_engine(EngineState.IN_SYNC, after=tainted.seq)
    siege.assert_answers()
