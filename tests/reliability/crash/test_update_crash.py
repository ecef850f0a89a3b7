"""kill -9 at every journal and HTTP step of an update: the service, restarted, brings the engine to the target.

The service runs as `refitd serve` runs it, in a process of its own that kills itself. The engine goes on with a load
whose caller is gone: the embedded one, with SGLang's habits; and a vLLM of a few lines, stock or with the plugin. The
journal is a file, or that of a group, in PostgreSQL, of which the next service takes the lead over.
"""

from collections.abc import Generator
from itertools import count
from pathlib import Path

import httpx
import pytest
import tiny_models
from mini_stage import mini_stage
from nursery import PATIENCE, Nursery
from update_stage import Remains, Stage, mended_since, question

from refitd_hosts.group.address import PostgresAddress
from support import points
from support.servers import EmbeddedServer

LOAD_SECONDS = 0.03  # long enough for a service to be back while the load of the one before still runs


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return tiny_models.make(tmp_path_factory.mktemp("variants"), 3)


@pytest.fixture(scope="module")
def engine(variants: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[EmbeddedServer]:
    flags = ("--defects", "--load-delay", str(LOAD_SECONDS))
    with EmbeddedServer(tmp_path_factory.mktemp("engine"), variants[0], *flags) as engine:
        yield engine


VLLM = ("vllm", "vllm-plugged")


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Stage]:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
        if request.param != "embedded":
            is_group = request.param == "vllm-postgres"
            database = PostgresAddress(request.getfixturevalue("postgres").database()) if is_group else None
            plugged = request.param == "vllm-plugged"
            with mini_stage(tmp_path, http, LOAD_SECONDS, plugged=plugged, database=database) as stage:
                yield stage
            return
        models = request.getfixturevalue("variants")
        stage = Stage(tmp_path, request.getfixturevalue("engine"), models, [], http)
        stage.ask_engine("POST", "/continue_generation", {})  # a test that failed may have left it paused
        for model in models:
            order = {"model_path": str(model), "load_format": "auto"}
            stage.ask_engine("POST", "/update_weights_from_disk", order)
            stage.answers.append(stage.ask_engine("POST", "/generate", question())["output_ids"])
        assert len({tuple(answer) for answer in stage.answers}) == len(models)
        yield stage


def every_point(stage: Stage) -> Generator[str]:
    """Every call of an update, and batches of the journal for as long as the test asks for them.

    Where the journal is in PostgreSQL, its batches alone: the calls are the same.
    """
    yield from calls_of(stage)
    yield from (f"{when} {number}" for number in count(1) for when in ("commit", "committed"))


def calls_of(stage: Stage) -> list[str]:
    return stage.update.points if stage.database is None else []


@pytest.mark.points
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stage",
    ["embedded", "vllm", pytest.param("vllm-plugged", marks=pytest.mark.thorough), "vllm-postgres"],
    indirect=True,
)
def test_kill_9_at_every_journal_and_http_step_of_an_update(stage: Stage) -> None:
    """Each update dies at another effect, until all calls and all commits were had."""
    died: list[str] = []
    with Nursery(stage.folder, stage.settings) as nursery:
        point = next(following := points.taken(every_point(stage)))
        service = nursery.bring_up(die_on=point)
        stage.publish()
        stage.announce(service)
        stage.check_whole(service)
        while True:
            nursery.arm(service)
            version = stage.publish()
            answered = stage.announce(service)
            if answered and stage.is_served(service):
                break
            nursery.bury()
            died.append(point)
            assert point in service.effects
            remains = Remains.of(stage.state)
            remains.check(service.effects, version, stage.update)
            assert not answered or version in remains.versions, "a notice is lost"
            point = next(following)
            service = nursery.bring_up(die_on=point)
            assert answered or stage.announce(service)
            stage.check_whole(service)
            assert mended_since(stage.state, remains.last_event) == bool(remains.open), died[-1]
            now = Remains.of(stage.state)
            assert not remains.open or now.loads > remains.loads, "mended without a load"
            since = {attempt.version for attempt in now.attempts if attempt.id not in remains.ids}
            assert since <= {version}, "for a moment it answered from an older step"
    print(f"died at {len(died)} effects: {', '.join(died)}")
    assert point.startswith("commit"), "every call was had"
    # The notice, the intent and the end each wait for a commit; what else there is may share one.
    assert len(died) >= (len(calls_of(stage)) + 2 * 3) // points.STRIDE, "and every commit"


@pytest.mark.points
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stage", "begun"),
    [
        pytest.param("embedded", False, marks=pytest.mark.thorough, id="on its first start"),
        pytest.param("embedded", True, id="after a kill in mid-load"),
        *(pytest.param(kind, True, marks=pytest.mark.thorough, id=f"{kind} after a kill in mid-load") for kind in VLLM),
    ],
    indirect=["stage"],
)
def test_kill_9_at_every_journal_and_http_step_of_a_start(stage: Stage, begun: bool) -> None:
    """The service dies again and again, one effect later each time, on what the one before has left."""
    died, done = list[str](), list[str]()
    with Nursery(stage.folder, stage.settings) as nursery:
        if begun:
            service = nursery.bring_up(die_on=f"sent {stage.update.load}")
            stage.publish()
            stage.announce(service)
            stage.check_whole(service)
            nursery.arm(service)
        version = stage.publish()
        if begun:
            stage.announce(service)
            nursery.bury()
        for number in points.numbers():
            service = nursery.bring_up(die_at=number, armed=True)
            if service.url is not None and stage.announce(service) and stage.is_served(service):
                break
            if service.url is not None:
                nursery.bury()
            died.append(service.effects[number - 1])
            done += service.effects
            Remains.of(stage.state).check(done, version, stage.update)
        stage.check_service(service)
        stage.check_engine()
    print(f"died at {len(died)} effects: {', '.join(died)}")
    # Effects overlap, so the same number is not the same effect in two lives, and no life need die at the load itself:
    # the test of an update dies at each call by name. Here each life got one effect further, past a whole load.
    load = stage.update.load
    assert {f"{when} {load}" for when in ("before", "sent", "heard")} <= {*done, *service.effects}
