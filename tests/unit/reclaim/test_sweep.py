"""The sweep against whatever comes in between: a reader, a rollback, a pin, a kill, a cancellation."""

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.policy.holdings import Holdings
from refitd.policy.keep import KeepRules
from refitd.policy.leases import EngineView, Load, RunView, Views
from refitd.reclaim import trash
from refitd.reclaim.folders import DiskFolders
from refitd.reclaim.sweep import Sweeper
from refitd.root.handle import Identity
from refitd.root.scan import Discarded, Gone, Refused
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, version_folder, version_id
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import Reclaimable, ReclaimPlan
from support.rawfiles import raw
from support.sweeps import MemoryBooks, StoppedClock

SIZE = len(raw(b"{}")) + len("{}")


class World(MemoryBooks):
    """A run of small versions."""

    def __init__(self, root: Path, steps: int = 4) -> None:
        super().__init__(root)
        for step in range(1, steps + 1):
            self.add(step)

    def add(self, step: int, state: VersionState = VersionState.SEALED) -> None:
        path = f"exp/{version_folder(Order(1, step))}"
        (self.root / path).mkdir(parents=True)
        (self.root / path / "model.safetensors").write_bytes(raw(b"{}"))
        (self.root / path / "config.json").write_text("{}")
        record = VersionRecord(run="exp", order=Order(1, step), path=path, state=state, created_at="").having(
            bytes=SIZE
        )
        self.records[record.id] = record

    def pin(self, step: int) -> None:
        name = v(step)
        self.records[name] = self.records[name].having(pinned=True)

    def on_disk(self) -> list[int]:
        return sorted(int(path.name[1:]) for path in (self.root / "exp").glob("v*"))

    @property
    def in_trash(self) -> list[Path]:
        return list((self.root / ".refitd" / "trash").glob("*"))


def v(step: int) -> str:
    return version_id("exp", Order(1, step))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "root")


def sweeper(world: World, *, last: int = 2, folders: DiskFolders | None = None) -> Sweeper:
    folders = folders or DiskFolders(world.root)
    return Sweeper(folders, world, StoppedClock(), rules=KeepRules(last=last))


def line(plan: ReclaimPlan, step: int) -> Reclaimable:
    return next(item for item in plan.items if item.version == v(step))


async def test_a_plan_says_what_a_sweep_would_do_and_does_nothing(world: World) -> None:
    plan = await sweeper(world).plan()
    assert [(item.version, item.keep) for item in plan.items] == [
        (v(1), False),
        (v(2), False),
        (v(3), True),
        (v(4), True),
    ]
    assert all(item.reasons for item in plan.items)
    assert (plan.freed_bytes, plan.done) == (2 * SIZE, False)
    assert world.on_disk() == [1, 2, 3, 4]
    assert world.log == []


async def test_a_sweep_does_what_the_plan_says(world: World) -> None:
    planned = await sweeper(world).plan()
    done = await sweeper(world).run()
    assert done == replace(planned, done=True)
    assert world.on_disk() == [3, 4]
    assert world.in_trash == []
    assert world.log == ["retire 1", "deleted 1", "retire 2", "deleted 2"]
    again = await sweeper(world).run()
    assert (again.freed_bytes, [item.keep for item in again.items]) == (0, [True, True])


def _reader(world: World) -> None:
    load = Load(version=v(2))
    world.seen = Views(engines=(EngineView(id="e", run="exp", state=EngineState.UPDATING, loads=(load,)),))


def _rollback(world: World) -> None:
    world.seen = Views(runs=(RunView(run="exp", target=v(2), last_good=v(2), rolling_back=True),))


def _pin(world: World) -> None:
    world.pin(2)


ARRIVALS = [
    pytest.param(_reader, "engine e loads it", id="reader"),
    pytest.param(_rollback, "run exp is being rolled back to it", id="rollback"),
    pytest.param(_pin, "pinned", id="pin"),
]


@pytest.mark.parametrize(("arrive", "reason"), ARRIVALS)
async def test_what_comes_after_the_plan_keeps_the_version(
    world: World, arrive: Callable[[World], None], reason: str
) -> None:
    """It comes while version 1 is collected, when the sweep has already decided about version 2."""
    world.in_between = lambda: arrive(world)
    plan = await sweeper(world).run()
    assert world.on_disk() == [2, 3, 4]
    assert world.log == ["retire 1", "deleted 1"], "version 2 was not even retired"
    assert line(plan, 2).keep
    assert reason in line(plan, 2).reasons


@pytest.mark.parametrize(("arrive", "reason"), ARRIVALS)
async def test_what_comes_while_the_books_become_durable_keeps_the_version(
    world: World, arrive: Callable[[World], None], reason: str
) -> None:
    def in_between() -> None:
        if world.log[-1] == "retire 2":
            arrive(world)

    world.in_between = in_between
    plan = await sweeper(world).run()
    assert world.on_disk() == [2, 3, 4]
    assert line(plan, 2).keep
    assert reason in line(plan, 2).reasons


@pytest.mark.parametrize(("arrive", "reason"), ARRIVALS)
async def test_what_comes_while_the_folder_is_examined_keeps_the_version(
    world: World, arrive: Callable[[World], None], reason: str
) -> None:
    class Slow(DiskFolders):
        async def examine(self, path: str) -> Holdings | Gone | Refused:
            found = await super().examine(path)
            if path == world.records[v(2)].path:
                arrive(world)
            return found

    plan = await sweeper(world, folders=Slow(world.root)).run()
    assert world.on_disk() == [2, 3, 4]
    assert world.log == ["retire 1", "deleted 1"]
    assert reason in line(plan, 2).reasons


def chained(world: World, *steps: int) -> None:
    """Make them deltas, each on the version of the step before it."""
    for step in steps:
        world.records[v(step)] = replace(world.records[v(step)], kind=Kind.DELTA, base=v(step - 1))


async def test_where_the_newest_is_lost_during_a_deletion_all_that_is_left_stands_on_what_is_there(
    world: World,
) -> None:
    class Losing(DiskFolders):
        async def discard(self, path: str, folder: Holdings) -> Discarded | Gone | Refused:
            world.records[v(4)] = replace(world.records[v(4)], state=VersionState.LOST)
            return await super().discard(path, folder)

    chained(world, 2, 3)
    await sweeper(world, last=1, folders=Losing(world.root)).run()
    assert world.log == ["retire 3", "deleted 3"]
    assert world.on_disk() == [1, 2, 4]


async def test_a_base_stays_as_long_as_a_delta_on_it_cannot_be_taken_away(world: World) -> None:
    class Unreadable(DiskFolders):
        async def examine(self, path: str) -> Holdings | Gone | Refused:
            broken = path == world.records[v(2)].path
            return Refused(path, "Input/output error") if broken else await super().examine(path)

    chained(world, 2)
    plan = await sweeper(world, last=1, folders=Unreadable(world.root)).run()
    assert world.on_disk() == [1, 2, 4]
    assert line(plan, 1).reasons == [f"{v(2)} stands on it, and goes first"]
    await sweeper(world, last=1).run()
    assert world.log == ["retire 3", "deleted 3", "retire 2", "deleted 2", "retire 1", "deleted 1"]


async def test_a_delta_goes_right_before_what_it_stands_on_and_all_else_as_it_comes(tmp_path: Path) -> None:
    world = World(tmp_path, steps=7)
    chained(world, 2, 4, 5)
    await sweeper(world, last=1).run()
    assert [said for said in world.log if said.startswith("deleted")] == [f"deleted {n}" for n in (2, 1, 5, 4, 3, 6)]


async def test_an_empty_or_failed_listing_deletes_nothing(world: World) -> None:
    leftover = world.root / ".refitd" / "trash" / ("0" * 32) / "x"
    leftover.mkdir(parents=True)
    world.failure = "Input/output error"
    plan = await sweeper(world, last=1).run()
    assert all(item.keep for item in plan.items)
    world.failure = None
    (world.root / "exp").rename(world.root / ".unmounted")
    plan = await sweeper(world, last=1).run()
    assert all(item.keep for item in plan.items)
    assert world.log == []
    assert leftover.exists()


async def test_books_that_cannot_be_written_stop_the_sweep_before_it_deletes(world: World) -> None:
    def fail() -> None:
        raise OSError("disk full")

    world.in_between = fail
    with pytest.raises(OSError, match="disk full"):
        await sweeper(world).run()
    assert world.on_disk() == [1, 2, 3, 4]
    world.in_between = lambda: None
    await sweeper(world).run()
    assert world.on_disk() == [3, 4]


async def test_a_folder_swapped_after_it_was_examined_is_kept_and_explained(world: World) -> None:
    def swap() -> None:
        (world.root / "exp" / "v000001").rename(world.root / "away")
        (world.root / "exp" / "v000001").mkdir()
        world.in_between = lambda: None

    world.in_between = swap
    plan = await sweeper(world).run()
    assert world.on_disk() == [1, 3, 4]
    assert line(plan, 1).keep
    assert "not the folder that was examined" in line(plan, 1).reasons[0]
    assert plan.freed_bytes == SIZE


async def test_an_abandoned_incoming_folder_is_taken_away_and_a_living_one_explained(world: World) -> None:
    for name in (".incoming-dead", ".incoming-new"):
        (world.root / "exp" / name).mkdir()
    os.utime(world.root / "exp" / ".incoming-dead", (0, 0))
    planned = await sweeper(world).plan()
    assert [item.keep for item in planned.items if ".incoming" in item.path] == [False, True]
    plan = await sweeper(world).run()
    assert [item.keep for item in plan.items if ".incoming" in item.path] == [False, True]
    assert sorted(path.name for path in (world.root / "exp").glob(".incoming-*")) == [".incoming-new"]
    assert world.in_trash == []


@pytest.mark.parametrize("state", [s for s in VersionState if s not in {VersionState.SEALED, VersionState.DELETED}])
async def test_what_a_version_takes_is_seen_at_its_folder_whatever_its_state(world: World, state: VersionState) -> None:
    world.add(9, state)
    world.records[v(9)] = world.records[v(9)].having(bytes=None)
    assert line(await sweeper(world).plan(), 9).bytes == SIZE
    await sweeper(world).run()
    remembered = {VersionState.REJECTED, VersionState.UNKNOWN}
    assert v(9) not in world.records or (world.records[v(9)].files.bytes == SIZE) is (state in remembered)


async def test_two_versions_in_one_folder_take_its_room_once(world: World) -> None:
    """A trainer wrote the same folder again: the version that was there before is lost."""
    again = replace(world.records[v(4)], order=Order(2, 4))
    world.records[v(4)] = replace(world.records[v(4)], state=VersionState.LOST)
    world.records[again.id] = again
    plan = await sweeper(world, last=9).plan()
    assert plan.kept_bytes == 4 * SIZE


async def test_a_folder_that_its_trainer_has_deleted_does_not_keep_its_run(world: World) -> None:
    """A rejected version whose folder was deleted is no lost one, and was refused for ever."""
    (world.root / "exp/step-9").mkdir()
    record = VersionRecord(
        run="exp", order=Order(1, 9), path="exp/step-9", state=VersionState.REJECTED, created_at=""
    ).having(noticed=True)
    world.records[record.id] = record
    assert "exp/step-9" in (await sweeper(world).why_not_deleted("exp") or "")
    (world.root / "exp/step-9").rmdir()
    assert "exp/step-9" not in (await sweeper(world).why_not_deleted("exp") or "")


async def test_what_lies_where_a_version_was_deleted_is_told(world: World) -> None:
    await sweeper(world).run()
    (world.root / "exp" / "v000001").mkdir()
    (world.root / "exp" / "v000001" / "thesis").write_text("years of work")
    for plan in (await sweeper(world).plan(), await sweeper(world).run()):
        (told,) = [item for item in plan.items if item.path == "exp/v000001"]
        assert (told.keep, told.bytes, told.foreign_bytes) == (True, 13, 13)
        assert "its version was deleted" in told.reasons[0]
    assert (world.root / "exp" / "v000001" / "thesis").exists()


async def test_evidence_ages_by_the_monotonic_clock_from_when_it_was_first_seen(world: World) -> None:
    world.add(9, VersionState.REJECTED)
    clock = StoppedClock()
    sweep = Sweeper(DiskFolders(world.root), world, clock, rules=KeepRules())
    clock.seconds = 1e6
    assert line(await sweep.run(), 9).reasons == ["it is evidence of why it was REJECTED, and stays for another 24 h"]
    clock.seconds += 86399
    assert line(await sweep.run(), 9).keep
    clock.seconds += 1
    assert not line(await sweep.run(), 9).keep
    assert 9 not in world.on_disk()


async def test_a_service_that_restarts_each_day_still_collects_evidence_and_no_wall_clock_is_asked(
    world: World,
) -> None:
    world.add(9, VersionState.REJECTED)
    there: list[bool] = []
    for life in range(4):
        clock = StoppedClock()  # of another boot
        clock.seconds = 1e6 * life
        sweep = Sweeper(DiskFolders(world.root), world, clock, rules=KeepRules())
        for _ in range(8 * 6 + 1):  # eight hours, a sweep every ten minutes
            await sweep.run()
            clock.seconds += 600.0
        there.append(9 in world.on_disk())
    assert there == [True, True, False, False]


async def test_evidence_that_turned_good_and_bad_again_is_new(world: World) -> None:
    world.add(9, VersionState.LOST)
    clock = StoppedClock()
    sweep = Sweeper(DiskFolders(world.root), world, clock, rules=KeepRules())
    await sweep.run()
    clock.seconds += 7200.0
    await sweep.run()
    assert world.records[v(9)].verdict.bad_for == 7200.0
    for state in (VersionState.SEALED, VersionState.LOST):
        world.records[v(9)] = replace(world.records[v(9)], state=state)
        reasons = line(await sweep.run(), 9).reasons
    assert reasons == ["it is evidence of why it was LOST, and stays for another 24 h"]


async def test_sweeps_take_turns(world: World) -> None:
    plans = await asyncio.gather(*(one.run() for one in [sweeper(world)] * 3))
    assert [plan.freed_bytes for plan in plans] == [2 * SIZE, 0, 0]
    assert world.log == ["retire 1", "deleted 1", "retire 2", "deleted 2"]


async def test_after_a_cancellation_nothing_goes_on_and_the_next_sweep_finishes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = trash.discard

    def slow(root: int, path: str, expected: Identity, seal: str) -> object:
        reached.set()
        go_on.wait()
        return real(root, path, expected, seal)

    monkeypatch.setattr(trash, "discard", slow)
    task = asyncio.create_task(sweeper(world).run())
    await asyncio.to_thread(reached.wait)
    task.cancel()
    await asyncio.sleep(0)
    waits = not task.done()
    go_on.set()
    assert waits, "it waits for its thread"
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.log == ["retire 1"]
    assert world.on_disk() == [2, 3, 4], "the step that had begun was finished, and no other begun"
    monkeypatch.undo()
    await sweeper(world).run()
    assert world.log == ["retire 1", "deleted 1", "retire 2", "deleted 2"]
    assert world.in_trash == []


async def test_a_cancellation_stops_the_emptying_of_the_trash(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, over, results = threading.Event(), threading.Event(), []
    real = trash.empty

    def slow(root: int, stopped: Callable[[], bool]) -> object:
        if world.log == []:
            return real(root, stopped)  # of what an earlier sweep left, which is nothing
        reached.set()
        while not stopped() and not over.is_set():
            over.wait(0.001)
        results.append(real(root, stopped))
        return results[0]

    monkeypatch.setattr(trash, "empty", slow)
    task = asyncio.create_task(sweeper(world).run())
    await asyncio.to_thread(reached.wait)
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    over.set()
    assert task.cancelled()
    assert [result.folders for result in results] == [0]
    assert len(world.in_trash) == 2
    monkeypatch.undo()
    await sweeper(world).run()
    assert world.in_trash == []


async def test_what_dead_publishers_left_goes_before_what_a_rollback_needs(tmp_path: Path) -> None:
    """Three were killed in the middle of a version. The budget has room for what is served, and what was before."""
    world = World(tmp_path, steps=2)
    for step in (1, 2):
        world.records[v(step)] = world.records[v(step)].having(served_at="2026-01-01T00:00:00Z")
    for number in range(3):
        left = tmp_path / f"exp/.incoming-{number}"
        left.mkdir()
        (left / ".lock").touch()
        (left / "model.safetensors").write_bytes(bytes(SIZE))
    rules = KeepRules(last=2, disk_budget=2 * SIZE)
    sweeper = Sweeper(DiskFolders(tmp_path), world, SystemClock(), rules=rules)  # type: ignore[arg-type]
    await sweeper.run()
    assert world.on_disk() == [1, 2]
    assert list((tmp_path / "exp").glob(".incoming-*")) == []
