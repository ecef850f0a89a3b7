"""kill -9 at every journal and HTTP step of a rollout: the service, restarted, brings the engine to the target.

The service runs as `refitd serve` runs it, in a process of its own that kills itself; the engine is a real one, with
SGLang's habits: it goes on with a load whose caller is gone.
"""

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import tiny_models
from nursery import PATIENCE, Newborn, Nursery

from refitd.state.journal import reads
from refitd.state.journal.condition import Sound, examine_journal, reading
from refitd.state.journal.journal import JOURNAL_NAME
from refitd.state.journal.schema import attempts, unpack
from refitd.state.records import AttemptRecord
from refitd_client import WeightPublisher
from support import points
from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer

RUN = "run"
PROMPT = [5, 6, 7]
READS = ("/model_info", "/generate")
LOAD = "POST /update_weights_from_disk"
CALLS = ("POST /pause_generation", "POST /weights_checker", LOAD, "GET /model_info", "POST /continue_generation")
BEGINNING = ("POST /pause_generation", LOAD)  # to resume an engine whose contents are known needs no intent
LOAD_SECONDS = 0.03  # long enough for a service to be back while the load of the one before still runs
SLOW: dict[str, Any] = {"probe_interval": 3600.0, "scan_interval": 3600.0, "reclaim_interval": 3600.0, "watch": "poll"}


@dataclass
class Stage:
    """An engine, a root, and services that die on them. `answers` are those of each model, from a clean load."""

    folder: Path
    engine: EmbeddedServer
    models: list[Path]
    answers: list[list[int]]
    http: httpx.Client
    root: Path = field(init=False)
    state: Path = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.root, self.state = self.folder / "root", self.folder / "state"
        self.root.mkdir()

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the service. Nothing happens by the clock: the effects are those of the rollout."""
        keys = {}
        for name, key in (("engine_key_file", API_KEY), ("engine_admin_key_file", ADMIN_KEY)):
            keys[name] = str(self.folder / name)
            (self.folder / name).write_text(key)
        places = {"root": str(self.root), "state": str(self.state), "engines": [self.engine.url], "port": 0}
        return {**places, **keys, **SLOW, "keep_last": 1000}

    def publish(self) -> str:
        """Put the next version on the disk; return its id."""
        self.step += 1
        with WeightPublisher(self.root, RUN) as publisher:
            return publisher.publish(self.models[self.step % len(self.models)], step=self.step).version_id

    @property
    def version_id(self) -> str:
        return f"{RUN}~v{self.step:06d}"

    def announce(self, service: Newborn) -> bool:
        """Send the notice; whether the service answered that it has it."""
        try:
            reply = self.http.post(f"{service.url}/v1/versions", json={"run": RUN, "step": self.step})
        except httpx.TransportError:
            return False
        assert reply.status_code in {200, 202}, reply.text
        return True

    def is_served(self, service: Newborn) -> bool:
        """Wait for the version; False if the service is dead."""
        path = f"/v1/versions/{self.version_id}/wait"
        try:
            reply = self.http.get(f"{service.url}{path}", params={"for": "served", "timeout": 30})
        except httpx.TransportError:
            return False
        assert reply.json()["outcome"] == "served", reply.text
        return True

    def ask_engine(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Past refitd."""
        headers = {"Authorization": f"Bearer {API_KEY if path in READS else ADMIN_KEY}"}
        reply = self.http.request(method, f"{self.engine.url}{path}", json=body, headers=headers)
        return reply.raise_for_status().json()

    def check_engine(self) -> None:
        """It serves the version, by what it says and by what it answers, and is not paused."""
        assert self.ask_engine("GET", "/model_info") | {
            "model_path": str(self.root / RUN / f"v{self.step:06d}"),
            "weight_version": str(self.step),
        } == self.ask_engine("GET", "/model_info")
        answer = self.ask_engine("POST", "/generate", question())
        assert answer["output_ids"] == self.answers[self.step % len(self.models)]
        assert answer["meta_info"]["weight_version"] == str(self.step)

    def check_service(self, service: Newborn) -> None:
        """It has every version and the engine in sync; an engine that was may not have been probed again yet."""
        ends = time.monotonic() + PATIENCE
        while (engine := self.engine_of(service))["state"] != "IN_SYNC" and time.monotonic() < ends:
            time.sleep(0.01)
        assert (engine["state"], engine["version"]) == ("IN_SYNC", self.version_id), engine
        # What the service told the engine to do is never taken for another writer's: it was written down first.
        contests = [line for line in self.http.get(f"{service.url}/metrics").text.splitlines() if "contests{" in line]
        assert [line.rpartition(" ")[2] for line in contests] == ["0.0"]
        versions = self.http.get(f"{service.url}/v1/versions", params={"limit": 500}).json()["items"]
        assert {(v["step"], v["state"]) for v in versions} == {(step, "SEALED") for step in range(1, self.step + 1)}

    def engine_of(self, service: Newborn) -> dict[str, Any]:
        """The engine as the service sees it."""
        (engine,) = self.http.get(f"{service.url}/v1/engines").json()["items"]
        return engine

    def check_whole(self, service: Newborn) -> None:
        """A service that was brought up again brings everything where it belongs."""
        assert self.is_served(service)
        self.check_service(service)
        self.check_engine()


def question() -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


@dataclass
class Remains:
    """The journal of a dead service."""

    attempts: list[AttemptRecord]
    versions: set[str]
    last_event: int

    @classmethod
    def of(cls, state: Path) -> "Remains":
        """Read it, and see that it is in order."""
        condition = examine_journal(state / JOURNAL_NAME, thorough=True)
        assert isinstance(condition, Sound), condition
        with reading(state / JOURNAL_NAME) as connection:
            rows = connection.scalars(sa.select(attempts.c.record))
            return cls(
                [unpack(row, AttemptRecord) for row in rows],
                {version.id for version in reads.read_versions(connection)},
                reads.read_last_event(connection),
            )

    @property
    def open(self) -> list[AttemptRecord]:
        return [attempt for attempt in self.attempts if attempt.outcome is None]

    @property
    def ids(self) -> set[str]:
        return {attempt.id for attempt in self.attempts}

    @property
    def loads(self) -> int:
        """Those that were proved by content."""
        return sum(attempt.outcome == "ACK" for attempt in self.attempts)

    def check(self, effects: list[str], version: str) -> None:
        """Promise 3: intent before the calls that may change an engine, outcome after the last of them."""
        called = [effect for effect in effects if effect.endswith(BEGINNING)]
        known = [attempt for attempt in self.attempts if attempt.version == version]
        assert known or not called, f"the engine was called ({called[-1]}) without an intent in the journal"
        if not {f"heard {LOAD}", "heard POST /continue_generation"} <= set(effects):
            assert "ACK" not in {attempt.outcome for attempt in known}, f"an outcome before the end: {known}"


def mended_since(state: Path, event: int) -> bool:
    """Whether the log says that a start found an engine in the middle of a load."""
    with reading(state / JOURNAL_NAME) as connection:
        events = reads.read_events(connection, after=event, limit=10_000)
    return any("TAINTED: the service stopped" in each.text for each in events)


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
            remains.check(service.effects, version)
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
            Remains.of(stage.state).check(done, version)
        stage.check_service(service)
        stage.check_engine()
    print(f"died at {len(died)} effects: {', '.join(died)}")
    # Effects overlap, so the same number is not the same effect in two lives, and no life need die at the load itself:
    # the test of a rollout dies at each call by name. Here each life got one effect further, past a whole load.
    assert {f"{when} {LOAD}" for when in ("before", "sent", "heard")} <= {*done, *service.effects}
