"""Too many open files: what needs one is refused or waits, nothing is deleted or lost, and it ends by itself."""

import socket
from contextlib import ExitStack
from pathlib import Path

import psutil

from faults.stand import Stand, Subject, standing, until
from refitd_client import WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from support.jobs import PATIENCE, RUN
from support.proxy import Proxy

LIMIT = 64
SETTLED = {VersionState.SEALED, VersionState.RETIRED, VersionState.DELETED}


def limit(stand: Stand, files: int) -> None:
    """How many files the service may have open. What it has open already it keeps."""
    stand.process.rlimit(psutil.RLIMIT_NOFILE, (files, stand.process.rlimit(psutil.RLIMIT_NOFILE)[1]))


def test_too_many_open_files_for_a_while_lose_nothing(engine: Subject, tmp_path: Path) -> None:
    """For a while not a single file, folder or connection can be opened."""
    flags = ("--keep-last", "1")
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, *flags, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        before = stand.process.rlimit(psutil.RLIMIT_NOFILE)
        limit(stand, 3)
        stand.until_engine(EngineState.UNREACHABLE)
        with WeightPublisher(stand.root, RUN) as publisher:
            publisher.publish(engine.model(2), step=2)
        looks = stand.process.cpu_times().user
        until(lambda: stand.process.cpu_times().user > looks + 0.02)  # it goes on trying
        assert stand.refitd.is_running
        assert stand.folders() == ["v000001", "v000002"]
        stand.process.rlimit(psutil.RLIMIT_NOFILE, before)
        until(stand.client.ready)
        stand.is_served(2)
        assert engine.serves(2)
        assert not [event for event in stand.events if "lost" in event.text or "rejected" in event.text]
        assert stand.refitd.is_running


def test_too_many_open_files_with_many_connections_versions_and_engines(engine: Subject, tmp_path: Path) -> None:
    """A small limit from the start, more connections than it allows, a dozen engines, and versions all the time."""
    dead = [f"http://127.0.0.1:{port}" for port in range(1, 12)]
    by = ("prlimit", f"--nofile={LIMIT}:{LIMIT}")
    with ExitStack() as closing:
        stand = closing.enter_context(standing(tmp_path, engine, engines=[engine.server.url, *dead], by=by))
        stand.serve(engine.model(1), 1)
        with ExitStack() as crowd:
            for _ in range(2 * LIMIT):
                crowd.enter_context(socket.create_connection(("127.0.0.1", stand.refitd.port), timeout=PATIENCE))
            with WeightPublisher(stand.root, RUN) as publisher:
                for step in range(2, 6):
                    publisher.publish(engine.model(step), step=step)
            until(lambda: "[Errno 24]" in stand.refitd.log.read_text(), "no file was missing: the limit is too wide")
            assert stand.refitd.is_running
        until(stand.client.ready)
        stand.is_served(5)
        assert engine.serves(5)
        # A version that could not be opened meanwhile is tried again a little later.
        until(lambda: {version.state for version in stand.client.versions().items} <= SETTLED, "not all have a verdict")
        assert {"v000004", "v000005"} <= set(stand.folders())
