"""The fleet follows the engines file: added, changed, removed, broken, and as it was."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from refitd.policy.roster import move
from refitd.state.records import Source
from refitd.update import fleet
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import NewEngine
from support.fleets import Stage, running
from support.records import version
from support.simulated_engine import SimulatedEngine

A, B = "a:1", "b:1"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FILE_LOOK_SECONDS", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "engines.yaml", "{url: 'http://a:1'}")


def write(file: Path, *entries: str) -> Path:
    """Name engines, all at once."""
    return scribble(file, f"engines: [{', '.join(entries)}]")


def scribble(file: Path, text: str) -> Path:
    """Have other words in the file, all at once."""
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    return fresh.replace(file)


def delete(file: Path) -> None:
    file.unlink()


class Complaints:
    """What the fleet's log says of a file that cannot be used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.come = asyncio.Event()
        monkeypatch.setattr(fleet, "log", self)

    def error(self, _: str, **said: str) -> None:
        assert set(said) == {"error"}
        self.come.set()


@asynccontextmanager
async def following(file: Path) -> AsyncIterator[Stage]:
    engines = {name: SimulatedEngine() for name in ("a", "b", "c")}
    async with running(file.parent / "state", engines, engines_file=file) as stage:
        yield stage


async def engines_are(stage: Stage, *names: str) -> None:
    await stage.until(lambda: set(stage.store.engines) == set(names))


async def serving(stage: Stage, name: str, step: int = 1) -> None:
    await stage.until(lambda: stage.store.engines[name].serving == version(step).id)


async def test_an_engine_that_is_added_to_the_file_is_brought_to_the_target_and_the_others_go_on(file: Path) -> None:
    async with following(file) as stage:
        stage.store.put_version(version(1))
        await engines_are(stage, A)
        await serving(stage, A)
        write(file, "{url: 'http://a:1'}", "{url: 'http://b:1'}")
        await engines_are(stage, A, B)
        await serving(stage, B)
        assert {record.naming.source for record in stage.store.engines.values()} == {Source.FILE}
        assert len(stage.engines["a"].loads) == 1


async def test_an_engine_that_is_taken_out_of_the_file_is_let_go_of_and_the_others_go_on(file: Path) -> None:
    write(file, "{url: 'http://a:1'}", "{url: 'http://b:1'}")
    async with following(file) as stage:
        await engines_are(stage, A, B)
        write(file, "{url: 'http://b:1'}")
        await engines_are(stage, B)
        await stage.until(lambda: stage.engines["a"].closed)
        stage.store.put_version(version(1))
        await serving(stage, B)
        assert stage.engines["a"].loads == []


async def test_an_engine_that_is_taken_out_in_mid_load_ends_its_load_first(file: Path) -> None:
    async with following(file) as stage:
        gate = stage.engines["a"].gate = asyncio.Event()
        stage.store.put_version(version(1))
        await stage.until(lambda: A in stage.store.loading and bool(stage.engines["a"].loads))
        write(file)
        await engines_are(stage)
        assert not stage.engines["a"].closed
        gate.set()
        await stage.until(lambda: stage.engines["a"].closed)
        assert stage.store.loading == {}
        assert not stage.engines["a"].paused


async def test_an_engine_that_the_file_gives_another_root_is_spoken_to_anew_and_loads_from_there(file: Path) -> None:
    async with following(file) as stage:
        stage.store.put_version(version(1))
        await engines_are(stage, A)
        await serving(stage, A)
        write(file, "{url: 'http://a:1', root: /mnt}")
        await stage.until(lambda: stage.engines["a"].closed)
        await stage.until(lambda: len(stage.engines["a"].loads) == 2)
        await serving(stage, A)
        assert stage.engines["a"].loads == ["/root/run/v000001", "/mnt/run/v000001"]


async def test_an_engine_that_the_file_gives_another_address_is_another_engine(file: Path) -> None:
    write(file, "{url: 'http://a:1', id: one}")
    async with following(file) as stage:
        stage.store.put_version(version(1))
        await engines_are(stage, "one")
        await serving(stage, "one")
        write(file, "{url: 'http://b:1', id: one}")
        await stage.until(lambda: len(stage.engines["b"].loads) == 1)
        await serving(stage, "one")
        assert stage.store.engines["one"].url == "http://b:1"


async def test_an_engine_that_the_file_binds_to_a_run_follows_that_one(file: Path) -> None:
    async with following(file) as stage:
        for run in ("run", "other"):
            stage.store.put_version(version(1, run=run))
        await engines_are(stage, A)
        await stage.until(lambda: "2 runs" in (stage.store.engines[A].reason or ""))
        write(file, "{url: 'http://a:1', run: other}")
        await stage.until(lambda: stage.store.engines[A].serving == version(1, run="other").id)
        assert stage.engines["a"].loads == ["/root/other/v000001"]


async def test_a_move_holds_until_the_file_is_changed_to_name_another_run(file: Path) -> None:
    write(file, "{url: 'http://a:1', run: run}")
    async with following(file) as stage:
        for run in ("run", "other", "third"):
            stage.store.put_version(version(1, run=run))
        await engines_are(stage, A)
        await serving(stage, A)
        move(stage.store, stage.store.engines[A], "other")
        await stage.until(lambda: stage.store.engines[A].serving == version(1, run="other").id)
        write(file, "{url: 'http://a:1', run: run}", "{url: 'http://b:1', run: run}")
        await engines_are(stage, A, B)
        await serving(stage, B)
        assert stage.store.engines[A].run == "other", "the file says of it what it said"
    async with following(file) as stage:
        await stage.until(lambda: stage.store.faults.fleet is None)
        assert stage.store.engines[A].run == "other", "nor does a restart say anything"
        write(file, "{url: 'http://a:1', run: third}")
        await stage.until(lambda: stage.store.engines[A].serving == version(1, run="third").id)
        assert not stage.store.engines[A].naming.moved


@pytest.mark.parametrize(
    "broken", ["engines: [", "engines: [{}]", "engines: [{url: 'http://a:1'}, {url: 'http://a:1'}]"]
)
async def test_a_broken_file_takes_no_engine_away_and_is_read_again_when_it_is_mended(
    file: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints = Complaints(monkeypatch)
    async with following(file) as stage:
        await engines_are(stage, A)
        scribble(file, broken)
        await asyncio.wait_for(complaints.come.wait(), 10)
        stage.store.put_version(version(1))
        await serving(stage, A)
        assert stage.store.faults.fleet is None
        assert str(file) in (stage.store.faults.engines_file or "")
        write(file, "{url: 'http://a:1'}", "{url: 'http://b:1'}")
        await engines_are(stage, A, B)
        assert stage.store.faults.engines_file is None


async def test_a_file_that_is_deleted_takes_no_engine_away(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints = Complaints(monkeypatch)
    async with following(file) as stage:
        await engines_are(stage, A)
        delete(file)
        await asyncio.wait_for(complaints.come.wait(), 10)
        stage.store.put_version(version(1))
        await serving(stage, A)
        write(file, "{url: 'http://b:1'}")
        await engines_are(stage, B)


async def test_a_file_that_is_broken_at_the_start_says_so_until_it_is_mended(file: Path) -> None:
    scribble(file, "engines: [")
    async with following(file) as stage:
        await stage.until(lambda: "not YAML" in (stage.store.faults.fleet or ""))
        write(file, "{url: 'http://a:1'}")
        await engines_are(stage, A)
        await stage.until(lambda: stage.store.faults.fleet is None)


async def test_a_file_that_is_broken_at_a_restart_leaves_the_engines_that_the_journal_knows(file: Path) -> None:
    async with following(file) as stage:
        stage.store.put_version(version(1))
        await engines_are(stage, A)
        await serving(stage, A)
    scribble(file, "engines: [")
    async with following(file) as stage:
        await stage.until(lambda: "not YAML" in (stage.store.faults.fleet or ""))
        assert stage.store.engines[A].serving == version(1).id
        write(file, "{url: 'http://a:1'}")
        await stage.until(lambda: stage.store.faults.fleet is None)
        await stage.until(lambda: stage.store.engines[A].state is not EngineState.PROBING)


async def test_an_engine_that_the_api_added_is_not_the_file_s_to_take_away(file: Path) -> None:
    async with following(file) as stage:
        await engines_are(stage, A)
        stage.fleet.add(NewEngine(url="http://c:1"))
        write(file, "{url: 'http://b:1'}")
        await engines_are(stage, B, "c:1")
        assert stage.store.engines["c:1"].naming.source is Source.API
