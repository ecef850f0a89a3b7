"""Collecting against those who need what is collected: a reader, a rollback, a new pin. All of it on a real service."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from faults.stand import Stand, Subject, id_of, standing, until
from refitd_client import WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from support.jobs import PATIENCE, RUN, TOKEN
from support.proxy import Hold, Proxy

LOAD = "/update_weights_from_disk"
ROUNDS = 6
VERSIONS = 30
FLAGS = ("--keep-last", "1")


@contextmanager
def reclaiming(stand: Stand) -> Generator[None]:
    """Collect, again and again, while something else happens."""
    enough = threading.Event()
    failures: list[str] = []

    def reclaim() -> None:
        while not enough.is_set():
            reply = stand.ask("POST", "/v1/reclaim")
            if reply.status_code != 200:
                failures.append(reply.text)

    threads = [threading.Thread(target=reclaim) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    assert not failures


def whole(stand: Stand, step: int) -> bool:
    """Whether all files of a step are there."""
    folder = stand.root / RUN / f"v{step:06d}"
    return {"model.safetensors", "refit.json", "config.json"} <= {path.name for path in folder.glob("*")}


def test_gc_against_a_reader(engine: Subject, tmp_path: Path) -> None:
    """Whatever is newest, and however often it is collected: what an engine is reading stays until it has read it."""
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, *FLAGS, engines=[proxy.url]) as stand:
        stand.serve(engine.model(1), 1)
        with reclaiming(stand):
            for step in range(2, 2 + 2 * ROUNDS, 2):
                reading = Hold()
                proxy.plan(LOAD, reading)
                stand.publish(engine.model(step), step)
                reading.until_arrived()
                newer = stand.publish(engine.model(step + 1), step + 1)
                newer.wait(timeout=60, wait_for="sealed")
                assert whole(stand, step), "what an engine reads was deleted"
                reading.release()
                newer.wait(timeout=60)
                assert engine.serves(step + 1)
        assert "TAINTED" not in stand.states()
        assert "NACKED" not in stand.states()


def test_gc_against_a_rollback(engine: Subject, tmp_path: Path) -> None:
    """A rollback finds its goal whole, or is refused. It never leads to what is being deleted."""
    with standing(tmp_path, engine, *FLAGS) as stand:
        stand.serve(engine.model(1), 1)
        for step in range(2, 2 + ROUNDS):
            stand.client.pin(id_of(step - 1))
            stand.serve(engine.model(step), step)
            with reclaiming(stand):
                stand.ask("DELETE", f"/v1/versions/{id_of(step - 1)}/pin")
                reply = stand.ask("POST", "/v1/rollback", {"run": RUN, "to": id_of(step - 1)})
                assert reply.status_code in {200, 202, 404, 409}, reply.text
                goal = step - 1 if reply.is_success else step
                until(lambda goal=goal: _is_on(stand, goal), f"the engine is not on step {goal}")
            assert whole(stand, goal)
            assert engine.serves(goal)


def _is_on(stand: Stand, step: int) -> bool:
    engine = stand.engine_now
    return engine.state is EngineState.IN_SYNC and engine.step == step


def test_gc_against_a_new_pin(engine: Subject, tmp_path: Path) -> None:
    """A pin that was answered 2xx keeps the version as it was, however close the collector came."""
    with standing(tmp_path, engine, *FLAGS) as stand, WeightPublisher(stand.root, RUN) as publisher:
        for step in range(1, VERSIONS + 1):
            publisher.publish(engine.model(step), step=step)
            stand.announce(None, step)
            stand.client.pin(id_of(step))
        stand.is_served(VERSIONS)
        for step in range(1, VERSIONS):
            assert stand.client.wait(id_of(step), "sealed", timeout=PATIENCE).outcome.value != "pending"
        kept: list[int] = []
        with reclaiming(stand), talking(stand) as http:
            for step in range(1, VERSIONS):
                pin = f"/v1/versions/{id_of(step)}/pin"
                http.delete(pin).raise_for_status()
                pinned = http.put(pin)
                assert pinned.status_code in {200, 409}, pinned.text
                kept += [step] * pinned.is_success
        stand.client.reclaim()
        for step in kept:
            assert (stand.state_of(step), whole(stand, step)) == (VersionState.SEALED, True), f"step {step} was pinned"
        assert stand.folders() == [f"v{step:06d}" for step in [*kept, VERSIONS]]
        assert engine.serves(VERSIONS)


@contextmanager
def talking(stand: Stand) -> Generator[httpx.Client]:
    """A client that asks and asks again without a pause."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=stand.refitd.url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        yield http
