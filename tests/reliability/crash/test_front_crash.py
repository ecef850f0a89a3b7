"""kill -9 of the trainer, the front or the service at each point of an update that is sent through the front.

Engines go on with what they served, or serve the whole new version; none stays paused, nothing half received takes
memory, and the update of the next trainer works.
"""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import httpx
import pytest

from support.fronted import Fronted, fronted
from support.jobs import PATIENCE
from support.points import taken
from support.sglang_trainer import SglangTrainer, Tensors, sglang_trainer, tensors_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MODELS = ("model_a", "model_b")
POINTS = ("begun", "in_a_part", "after_a_part", "in_the_finish")


class Trained:
    """A run, its engines' answers with each model, and the weights that the next trainer sends."""

    def __init__(self, fronted: Fronted, models: Path) -> None:
        self.fronted = fronted
        self.weights = {name: tensors_of(models / name) for name in MODELS}
        self.expected: dict[str, list[list[int]]] = {}
        for name in MODELS:
            self.update(name)
            self.expected[name] = fronted.answers
        self.serves = MODELS[-1]

    @property
    def other(self) -> str:
        """The model that the engines do not serve."""
        return next(name for name in MODELS if name != self.serves)

    def update(self, name: str) -> None:
        """A new trainer's whole update."""
        with sglang_trainer(self.fronted.front.url) as trainer:
            assert trainer.connect() == ""
            assert trainer.as_miles(self.weights[name]) == ""
        self.serves = name

    def until(self, what: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < ends, self.fronted.job.refitd.tail()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Trained]:
    with fronted(models, tmp_path_factory.mktemp("front")) as each:
        yield Trained(each, models)


class Update:
    """A trainer's update up to a point, and on. `said` is the answer to the call that is under way there."""

    def __init__(
        self, trained: Trained, trainer: SglangTrainer, threads: ThreadPoolExecutor, frozen: ExitStack
    ) -> None:
        self._trained, self._trainer, self._threads, self._frozen = trained, trainer, threads, frozen
        self._rest = dict(trained.weights[trained.other])
        self._late: Tensors = {}
        self.said: Future[str] | None = None

    def begun(self) -> None:
        self._trainer.pause()
        assert self._trainer.post("begin_weight_update") == ""

    def after_a_part(self) -> None:
        self.begun()
        assert self._trainer.broadcast(self._next(5)) == ""

    def in_a_part(self) -> None:
        """The first of three tensors of the second bucket has come."""
        self.after_a_part()
        bucket = self._next(3)
        self.said = self._threads.submit(self._trainer.announce, bucket)
        self._trainer.rank.send(dict(list(bucket.items())[:1]))
        assert self._trainer.rank.done() == ""
        self._late = dict(list(bucket.items())[1:])
        self._trained.until(lambda: len(self._trained.fronted.received) == 2)

    def in_the_finish(self) -> None:
        """The service knows the version, and an engine does not answer."""
        self.begun()
        assert self._trainer.broadcast(self._next(len(self._rest))) == ""
        job = self._trained.fronted.job
        known = {version.id for version in job.client.versions().items}
        self._frozen.enter_context(self._trained.fronted.engines[0].frozen())
        self.said = self._threads.submit(self._trainer.post, "end_weight_update")
        self._trained.until(lambda: bool({version.id for version in job.client.versions().items} - known))

    def goes_on(self) -> None:
        """The trainer hears nothing of what has happened."""
        if self._late:
            self._trainer.rank.send(self._late)
            assert self._trainer.rank.done() == ""
        if self.said is not None:
            assert self.said.result() == ""
        if self._rest:
            assert self._trainer.broadcast(self._rest) == ""
        assert self._trainer.post("end_weight_update") == ""
        assert self._trainer.post("continue_generation") == ""

    def ends(self) -> None:
        """Its call is answered, or its connection is closed."""
        if self.said is not None:
            with suppress(httpx.HTTPError):
                self.said.result()

    def _next(self, count: int) -> Tensors:
        names = list(self._rest)[:count]
        return {name: self._rest.pop(name) for name in names}


@pytest.mark.points
@pytest.mark.parametrize(
    ("victim", "point"),
    [*taken(product(("trainer", "front", "service"), POINTS))],
)
def test_a_process_that_is_killed_in_the_middle_of_an_update_leaves_all_engines_at_one_whole_version(
    trained: Trained, victim: str, point: str
) -> None:
    each, before, new = trained.fronted, trained.expected[trained.serves], trained.expected[trained.other]
    with sglang_trainer(each.front.url) as trainer, ThreadPoolExecutor() as threads:
        with ExitStack() as frozen:
            update = Update(trained, trainer, threads, frozen)
            assert trainer.connect() == ""
            getattr(update, point)()
            {"trainer": trainer.rank, "front": each.front, "service": each.job.refitd}[victim].kill()
        if victim == "trainer":
            update.ends()
            assert each.answers == (new if point == "in_the_finish" else before)
            assert each.received == [] or point == "after_a_part"  # nobody can tell yet that nothing will follow
        elif victim == "front":
            each.front.restart()
            update.ends()
            assert each.received == []
        else:
            each.job.refitd.restart()
            update.goes_on()
            assert each.answers == new
    trained.until(lambda: each.is_well or point == "after_a_part")
    assert each.answers == (new if victim == "service" or point == "in_the_finish" else before)
    if each.answers == new:
        trained.serves = trained.other
    trained.update(trained.other)
    assert each.is_well
