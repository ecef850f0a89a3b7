"""Services of a group on one PostgreSQL and one root, each a process of its own."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psycopg
from safetensors.torch import save_file

from refitd_client import WeightPublisher
from support.mini_sglang import tiny_weights
from support.mini_vllm import MiniVllm
from support.servers import ADMIN_KEY, API_KEY, RefitdServer

PATIENCE = 60.0  # seconds, on a busy machine; what is measured is measured by the benchmark
# One for all: a client of its own for each question would take more CPU than the services. Each question has a new
# connection, because services end and begin.
_HTTP = httpx.Client(trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0))  # noqa: S501


class HubServer(RefitdServer):
    """`refitd serve --state postgresql://…`. It counts as up when it stands by."""

    ready = re.compile(rb" (?:ready|stands by) on http://127\.0\.0\.1:(\d+)(?:$|\")")

    def __init__(self, folder: Path, root: Path, database: str, engines: Sequence[str], *flags: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, root, engines, "--state", database, *flags)

    def name_database(self, database: str) -> None:
        """Give it another URI of the group's database, from its next start on."""
        self._arguments += ["--state", database]

    def leads(self) -> bool:
        """Whether it is ready, which only the leader is."""
        try:
            return _HTTP.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, path: str) -> dict[str, Any]:
        """What it answers to a GET."""
        return _HTTP.get(f"{self.url}{path}", timeout=10).json()


def until(what: Callable[[], object], told: str) -> None:
    """Wait until something is so."""
    ends = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < ends, f"after {PATIENCE:g} s it is not so that {told}"
        time.sleep(0.02)


def leader_of(hubs: Sequence[HubServer]) -> HubServer:
    """The one that leads, once one does."""
    found: list[HubServer] = []

    def one() -> bool:
        found[:] = [hub for hub in hubs if hub.is_running and hub.leads()]
        return len(found) == 1

    until(one, "one service of the group leads")
    return found[0]


def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    """What is in the group's database."""
    with psycopg.connect(database, autocommit=True) as connection:
        return connection.execute(query.encode()).fetchall()


RUN = "run"
_QUICK = ("--probe-interval", "0.2", "--scan-interval", "0.2", "--keep-last", "100", "--insecure")


class Group:
    """Two services, an engine that they update, a trainer."""

    def __init__(self, folder: Path, database: str, engine: MiniVllm, *flags: str) -> None:
        self.database, self.root, self.engine = database, folder / "root", engine
        self.revived = 0
        self.root.mkdir(exist_ok=True)
        self.sources: list[Path] = []
        for seed in (1, 2):
            self.sources.append(folder / f"m{seed}")
            self.sources[-1].mkdir()
            save_file(tiny_weights(seed), self.sources[-1] / "model.safetensors")
        keys: list[str] = []
        for flag, key in (("--engine-key-file", API_KEY), ("--engine-admin-key-file", ADMIN_KEY)):
            file = folder / flag.strip("-")
            file.write_text(key)
            keys += [flag, str(file)]
        self.hubs = [
            HubServer(folder / name, self.root, database, [engine.url], *_QUICK, *keys, *flags)
            for name in ("one", "two")
        ]

    def start(self) -> HubServer:
        """Start both; the one that leads."""
        for hub in self.hubs:
            hub.start()
        return leader_of(self.hubs)

    def revive(self, *but: HubServer) -> None:
        """Start those again that have ended by themselves, as systemd does: not those that were killed."""
        for hub in self.hubs:
            if hub not in but and not hub.is_running:
                hub.port = 0  # another program may have got it meanwhile
                hub.restart()
                self.revived += 1

    def other(self, hub: HubServer) -> HubServer:
        """The one of both that this is not."""
        return next(each for each in self.hubs if each is not hub)

    def stop(self) -> None:
        """Stop both, also one that is stopped by a signal."""
        for hub in self.hubs:
            if hub.is_running:
                hub.process.send_signal(signal.SIGCONT)
            hub.stop()

    def publish(self, step: int) -> str:
        """Write a version; its id. No service is told."""
        with WeightPublisher(self.root, RUN) as publisher:
            return publisher.publish(self.sources[step % 2], step=step).version_id

    def loads(self, version: str) -> bool:
        """Whether an attempt to load a version has begun and not ended."""
        query = f"SELECT 1 FROM attempts WHERE outcome IS NULL AND version = '{version}'"  # noqa: S608
        return bool(rows(self.database, query))

    def until_served(self, hub: HubServer, version: str) -> None:
        """Wait until the engine serves a version."""

        def served() -> bool:
            (engine,) = hub.ask("/v1/engines")["items"]
            return (engine["state"], engine["version"]) == ("IN_SYNC", version)

        until(served, f"{version} is served")

    def check(self, last: int) -> None:
        """No version is lost, none had two updates, epochs only grow, the engine serves the newest."""
        versions = rows(self.database, "SELECT step, state FROM versions ORDER BY step")
        assert versions == [(step, "SEALED") for step in range(1, last + 1)]
        updates = [version for (version,) in rows(self.database, "SELECT version FROM updates ORDER BY number")]
        assert len(updates) == len(set(updates)), updates
        assert (self.engine.label, self.engine.paused) == (str(last), False)
        assert self.engine.holds(1 + last % 2)
