"""kill -9 at every journal and HTTP step of a rollout: the service, restarted, brings the engine to the target.

The service runs as `refitd serve` runs it, in a process of its own that kills itself; the engine is a real one, with
SGLang's habits: it goes on with a load whose caller is gone.
"""

from collections.abc import Generator
from itertools import count
from pathlib import Path

import httpx
import pytest
import tiny_models
from nursery import PATIENCE, Nursery
from rollout_stage import Calls, Remains, Stage, mended_since, question

from support import points
from support.servers import EmbeddedServer

LOAD = "POST /update_weights_from_disk"
CALLS = ("POST /pause_generation", "POST /weights_checker", LOAD, "GET /model_info", "POST /continue_generation")
UPDATE = Calls(pause=CALLS[0], load=LOAD, resume=CALLS[-1])
LOAD_SECONDS = 0.03  # long enough for a service to be back while the load of the one before still runs


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return tiny_models.make(tmp_path_factory.mktemp("variants"), 3)


@pytest.fixture(scope="module")
def engine(variants: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[EmbeddedServer]:
    flags = ("--defects", "--load-delay", str(LOAD_SECONDS))
    with EmbeddedServer(tmp_path_factory.mktemp("engine"), variants[0], *flags) as engine:
        yield engine


@pytest.fixture
def stage(tmp_path: Path, engine: EmbeddedServer, variants: list[Path]) -> Generator[Stage]:
    with httpx.Client(timeout=PATIENCE, trust_env=False) as http:
        stage = Stage(tmp_path, engine, variants, [], http)
        stage.ask_engine("POST", "/continue_generation", {})  # a test that failed may have left it paused
        for model in variants:
            order = {"model_path": str(model), "load_format": "auto"}
            stage.ask_engine("POST", "/update_weights_from_disk", order)
            stage.answers.append(stage.ask_engine("POST", "/generate", question())["output_ids"])
        assert len({tuple(answer) for answer in stage.answers}) == len(variants)
        yield stage


def every_point() -> Generator[str]:
    """Every call of a rollout, and batches of the journal for as long as the test asks for them."""
    yield from (f"{when} {call}" for call in CALLS for when in ("before", "sent", "heard"))
    yield from (f"{when} {number}" for number in count(1) for when in ("commit", "committed"))


@pytest.mark.points
def test_kill_9_at_every_journal_and_http_step_of_a_rollout(stage: Stage) -> None:
    """Each rollout dies at another effect, until all calls and all commits were had."""
    died: list[str] = []
    with Nursery(stage.folder, stage.settings) as nursery:
        point = next(following := points.taken(every_point()))
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
            remains.check(service.effects, version, UPDATE)
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
    assert len(died) >= (3 * len(CALLS) + 2 * 3) // points.STRIDE, "and every commit"


@pytest.mark.points
@pytest.mark.parametrize("begun", [False, True], ids=["on its first start", "after a kill in mid-load"])
def test_kill_9_at_every_journal_and_http_step_of_a_start(stage: Stage, begun: bool) -> None:
    """The service dies again and again, one effect later each time, on what the one before has left."""
    died, done = list[str](), list[str]()
    with Nursery(stage.folder, stage.settings) as nursery:
        if begun:
            service = nursery.bring_up(die_on=f"sent {LOAD}")
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
            Remains.of(stage.state).check(done, version, UPDATE)
        stage.check_service(service)
        stage.check_engine()
    print(f"died at {len(died)} effects: {', '.join(died)}")
    # Effects overlap, so the same number is not the same effect in two lives, and no life need die at the load itself:
    # the test of a rollout dies at each call by name. Here each life got one effect further, past a whole load.
    assert {f"{when} {LOAD}" for when in ("before", "sent", "heard")} <= {*done, *service.effects}
