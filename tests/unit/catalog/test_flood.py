"""Any number of folders in the root: each costs the same, none holds up the loop, and none holds up another run's."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.catalog import catalog
from refitd.catalog.catalog import Arrivals, newest_first
from refitd.catalog.judge import Waiting
from refitd.clock import SystemClock
from refitd.policy import goals
from refitd.root.scan import FoundFolder
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.state.version_index import VersionIndex
from refitd.update.targets import Targets
from refitd_client.contract.naming import Order
from refitd_client.contract.states import VersionState
from refitd_client.validation.foreign import is_foreign
from support.catalogs import RULES, watching
from support.checkpoints import publish, tensors
from support.records import engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    journal = Journal(tmp_path / "state")
    yield Store(journal, SystemClock())
    journal.close()


def folders(run: str, number: int) -> list[FoundFolder]:
    return [FoundFolder(run=run, order=Order(1, step), path=f"{run}/v{step:06d}") for step in range(1, number + 1)]


def follows(store: Store, run: str) -> None:
    store.put_engine(engine(run, run=run))


async def taken_in(store: Store, found: list[FoundFolder]) -> Waiting:
    waiting = Waiting(store)
    await Arrivals(store, RULES, waiting).take_in(found)
    return waiting


async def test_others_have_their_turn_while_folders_are_taken_in(store: Store) -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await taken_in(store, folders("run", 500))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert turns >= 500 // catalog.A_TURN


@pytest.mark.parametrize("number", [100, 400])
async def test_what_a_folder_costs_does_not_depend_on_how_many_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Counted are the versions that are looked at to say what engines are to serve, while it is asked all the time."""
    looked, real = 0, goals.choose_target

    def choose(versions: list[VersionRecord], *more: object) -> VersionRecord | None:
        nonlocal looked
        looked += len(versions)
        return real(versions, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(goals, "choose_target", choose)
    follows(store, "run")

    targets = Targets(store)

    class Asks:
        def __getattr__(self, _: str) -> object:
            return lambda *_: targets.of_run("run")

    store.observe(Asks())  # type: ignore[arg-type]
    await taken_in(store, folders("run", number))
    for version in list(store.open.values()):
        store.put_version(replace(version, state=VersionState.REJECTED))
    assert looked <= 3 * number


@pytest.mark.parametrize("number", [100, 400])
async def test_what_a_trainer_s_own_folder_costs_does_not_depend_on_how_many_there_are(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its order is that of the newest of its run: the others are not gone through for it."""
    looked, real = 0, VersionIndex.of_run

    def of_run(self: VersionIndex, run: str) -> list[VersionRecord]:
        nonlocal looked
        looked += len(found := real(self, run))
        return found

    monkeypatch.setattr(VersionIndex, "of_run", of_run)
    paths = [f"run/iter_{step:07d}" for step in range(1, number + 1)]
    assert all(is_foreign(path) for path in paths)
    found = [FoundFolder(run="run", order=Order(1, step), path=path) for step, path in enumerate(paths, 1)]
    await taken_in(store, found)
    await taken_in(store, found)
    assert len(store.versions) == number
    assert looked <= 3 * number


async def test_of_a_run_so_many_are_taken_in_and_the_rest_is_said_and_follows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_OPEN", 10)
    follows(store, "run")
    found = folders("run", 25)
    waiting = Waiting(store)
    taking = Arrivals(store, RULES, waiting)
    said: list[str] = []
    monkeypatch.setattr(store, "say", lambda kind, subject, text, **_: said.append(text) if kind == "root" else None)
    await taking.take_in(found)
    await taking.take_in(found)
    assert sorted(version.order.step for version in store.open.values()) == list(range(16, 26))
    assert store.faults.folders_left_out == 15
    assert len(said) == 1
    assert "15 folders are not taken in yet (15 of run run): 10 versions wait for a verdict already" in said[0]
    while store.open:
        for version in list(store.open.values()):
            store.put_version(replace(version, state=VersionState.REJECTED))
        await taking.take_in(found)
    assert (len(store.versions), store.faults.folders_left_out, len(said)) == (25, 0, 2)


async def test_a_flood_in_one_run_keeps_nothing_out_of_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do any number of runs that no engine follows."""
    monkeypatch.setattr(catalog, "MOST_OPEN", 10)
    follows(store, "good")
    junk = [each for run in range(30) for each in folders(f"junk-{run:02d}", 30)]
    waiting = await taken_in(store, [*junk, *folders("good", 2)])
    assert {version.run for version in store.open.values()} > {"good"}
    assert len(store.open) == 12
    assert [version.id for version in waiting.take()] == ["good~v000002", "good~v000001"]


def test_each_run_s_newest_comes_before_any_run_s_second() -> None:
    found = newest_first([*folders("a", 3), *folders("b", 1), *folders("c/d", 2)])
    assert [f"{each.run}:{each.order.step}" for each in found] == ["a:3", "b:1", "c/d:2", "a:2", "c/d:1", "a:1"]


async def test_a_version_that_is_announced_is_taken_in_whatever_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refitd_client.contract.wire import Notice

    monkeypatch.setattr(catalog, "MOST_OPEN", 0)
    async with watching(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.until(lambda: stage.store.faults.folders_left_out == 1)
        await stage.intake.take(Notice(run="run", step=1))
        await stage.verdict("run~v000001", VersionState.SEALED)
        await stage.until(lambda: stage.store.faults.folders_left_out == 0)


async def test_a_version_that_was_collected_without_a_verdict_is_waited_for_no_more(store: Store) -> None:
    waiting = await taken_in(store, folders("run", 1))
    (version,) = waiting.take()
    waiting.at(version.id)
    waiting.give_back(version.id)
    assert waiting.pause == pytest.approx(0.001)  # it is due now
    store.put_version(replace(version, state=VersionState.RETIRED))
    assert waiting.pause is not None
    assert waiting.pause > 60


async def test_folders_that_waited_to_be_taken_in_do_not_open_a_closed_run_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MOST_OPEN", 2)
    taking = Arrivals(store, RULES, Waiting(store))

    async def seen(steps: int) -> list[int]:
        await taking.take_in(folders("old", steps))
        return sorted(version.order.step for version in store.open.values())

    assert await seen(4) == [3, 4]
    store.close_run("old")
    for drop, left in ((3, [2, 4]), (2, [1, 4])):
        version = next(version for version in store.open.values() if version.order.step == drop)
        store.put_version(replace(version, state=VersionState.REJECTED))
        assert await seen(4) == left
        assert "old" in store.runs.closed
    store.put_version(replace(next(iter(store.open.values())), state=VersionState.REJECTED))
    assert 5 in await seen(5)
    assert "old" not in store.runs.closed, "it goes on"
