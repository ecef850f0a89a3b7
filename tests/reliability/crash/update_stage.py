"""A service that dies in the middle of an update: its engine, its root, what it leaves in its journal."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import httpx
import sqlalchemy as sa
from nursery import PATIENCE, Newborn

from refitd.state.journal import rows
from refitd.state.journal.database import JOURNAL_NAME
from refitd.state.journal.recovery import Condition, Sound, examine_journal, reading
from refitd.state.journal.schema import attempts, unpack
from refitd.state.records import AttemptRecord
from refitd_client import WeightPublisher
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import examine_group, reading_group
from support.servers import ADMIN_KEY, API_KEY

RUN = "run"
PROMPT = [5, 6, 7]
LEASE: dict[str, Any] = {"lease": 6.0}  # seconds: on a machine that does much else no lead is lost without a kill
READS = ("/model_info", "/generate")
SLOW: dict[str, Any] = {"probe_interval": 3600.0, "scan_interval": 3600.0}


class Engine(Protocol):
    """A server at an address."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class Calls:
    """What is sent to an engine in an update, in order: the pause first, the resume last. To resume one whose contents
    are known needs no intent. `asked`: what its plugin is asked.
    """

    order: tuple[str, ...]
    load: str
    asked: tuple[str, ...] = ()

    @property
    def pause(self) -> str:
        return self.order[0]

    @property
    def resume(self) -> str:
        return self.order[-1]

    @property
    def points(self) -> list[str]:
        """Where a service can die."""
        sent = [f"{when} {call}" for call in self.order for when in ("before", "sent", "heard")]
        return sent + [f"{when} plugin {request}" for request in self.asked for when in ("before", "heard")]


_LOAD = "POST /update_weights_from_disk"
_ORDER = ("POST /pause_generation", "POST /weights_checker", _LOAD, "GET /model_info", "POST /continue_generation")


@dataclass
class Stage:
    """An engine, a root, and services that die on them. `answers` are those of each model, from a clean load."""

    update: ClassVar[Calls] = Calls(_ORDER, _LOAD)

    folder: Path
    engine: Engine
    models: list[Path]
    answers: list[list[int]]
    http: httpx.Client
    database: PostgresAddress | None = None  # of a group, in place of the folder of a service alone
    root: Path = field(init=False)
    state: Path | PostgresAddress = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.root, self.state = self.folder / "root", self.database or self.folder / "state"
        self.root.mkdir(exist_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the service. Nothing happens by the clock: the effects are those of the update."""
        keys = {}
        for name, key in (("engine_key_file", API_KEY), ("engine_admin_key_file", ADMIN_KEY)):
            keys[name] = str(self.folder / name)
            (self.folder / name).write_text(key)
        state = str(self.state) if self.database is None else self.database.uri
        places = {"root": str(self.root), "state": state, "engines": [self.engine.url], "port": 0}
        return {**places, **keys, **SLOW, **({} if self.database is None else LEASE), "keep_last": 1000}

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
        except httpx.TransportError as error:
            print(f"{service.url} did not answer: {error!r}")
            return False
        assert reply.status_code in {200, 202}, reply.text
        return True

    def is_served(self, service: Newborn) -> bool:
        """Wait for the version; False if the service is dead."""
        path = f"/v1/versions/{self.version_id}/wait"
        try:
            reply = self.http.get(f"{service.url}{path}", params={"for": "served", "timeout": 30})
        except httpx.TransportError as error:
            print(f"{service.url} did not answer: {error!r}")
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
        versions = self.http.get(f"{service.url}/v1/versions", params={"run": RUN, "limit": 500}).json()["items"]
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
    def of(cls, state: Path | PostgresAddress) -> "Remains":
        """Read it, and see that it is in order."""
        condition = _examined(state)
        assert isinstance(condition, Sound), condition
        with _reading(state) as connection:
            found = connection.scalars(sa.select(attempts.c.record))
            return cls(
                [unpack(row, AttemptRecord) for row in found],
                {version.id for version in rows.read_versions(connection)},
                rows.read_last_event(connection),
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

    def check(self, effects: list[str], version: str, calls: Calls) -> None:
        """Promise 3: intent before the calls that may change an engine, outcome after the last of them."""
        called = [effect for effect in effects if effect.endswith((calls.pause, calls.load))]
        known = [attempt for attempt in self.attempts if attempt.version == version]
        assert known or not called, f"the engine was called ({called[-1]}) without an intent in the journal"
        if not {f"heard {calls.load}", f"heard {calls.resume}"} <= set(effects):
            assert "ACK" not in {attempt.outcome for attempt in known}, f"an outcome before the end: {known}"


def _examined(state: Path | PostgresAddress) -> Condition:
    if isinstance(state, PostgresAddress):
        return examine_group(state)
    return examine_journal(state / JOURNAL_NAME, thorough=True)


def _reading(state: Path | PostgresAddress) -> AbstractContextManager[sa.Connection]:
    return reading_group(state) if isinstance(state, PostgresAddress) else reading(state / JOURNAL_NAME)


def mended_since(state: Path | PostgresAddress, event: int) -> bool:
    """Whether the log says that a start found an engine in the middle of a load."""
    with _reading(state) as connection:
        events = rows.read_events(connection, after=event, limit=10_000)
    return any("TAINTED: the service stopped" in each.text for each in events)
