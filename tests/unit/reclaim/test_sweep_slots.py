"""The sweep with slots: what it discards comes back to the publisher, within bounds, and never too early."""

import errno
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from refitd.policy.keep import KeepRules
from refitd.policy.leases import EngineView, Views
from refitd.policy.spare_slots import SlotRules
from refitd.reclaim import slots
from refitd.reclaim.folders import DiskFolders
from refitd.reclaim.sweep import CopySweep, Sweeper
from refitd.root.scan import Discarded, Refused, sentence
from refitd_client import WeightPublisher
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Reclaimable
from support.records import version
from support.sweeps import MemoryBooks, StoppedClock

RUN = "exp/trial"


class World(MemoryBooks):
    """A trainer that publishes really."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.publisher = WeightPublisher(root, RUN)
        self.clock = StoppedClock()

    def publish(self, step: int, columns: int = 3) -> set[int]:
        weights = {"w": np.full((4, columns), step, np.float32)}
        path = self.publisher.publish(weights, step=step).path
        record = version(step, run=RUN, owned=True, bytes=_bytes(path))
        self.records[record.id] = record
        return {file.stat().st_ino for file in path.glob("*.safetensors")}

    def sweeper(
        self,
        *,
        last: int = 1,
        rules: SlotRules | None = None,
        budget: int | None = None,
        copies: CopySweep | None = None,
    ) -> Sweeper:
        return Sweeper(
            DiskFolders(self.root),
            self,
            self.clock,
            rules=KeepRules(last=last, disk_budget=budget),
            slots=rules or SlotRules(),
            copies=copies,
        )

    @property
    def slots(self) -> list[Path]:
        return sorted((self.root / ".refitd" / "slots").glob("*/*"))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def v(step: int) -> str:
    return version_id(RUN, Order(1, step))


def line(lines: list[Reclaimable], step: int) -> Reclaimable:
    return next(item for item in lines if item.version == v(step))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "root")


async def test_the_next_version_lies_in_the_files_of_one_that_was_reclaimed(world: World) -> None:
    first = world.publish(1)
    world.publish(2)
    plan = await world.sweeper().run()
    assert line(plan.items, 1).reasons[-1] == "its files are a free slot now"
    assert plan.freed_bytes == 0
    assert [item.keep for item in plan.items if "slots" in item.path] == [True]
    assert world.publish(3) == first
    assert world.slots == []
    assert list((world.root / ".refitd" / "trash").iterdir()) == []


async def test_why_files_are_not_recycled_is_logged_once_and_not_for_each_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int, discarded: Discarded, __: str) -> Refused:
        return Refused(discarded.path, sentence(discarded.path, OSError(errno.EIO, "Input/output error")))

    monkeypatch.setattr(slots, "hand_back", refused)
    sweeper, reasons = world.sweeper(), list[str]()
    with capture_logs() as logs:
        for step in range(1, 4):
            world.publish(step)
            reasons += [line.reasons[-1] for line in (await sweeper.run()).items if line.version == v(step - 1)]
    assert len(set(reasons)) == 2, "each names its version"
    assert [log["version"] for log in logs if log["event"] == "a version's files are not recycled"] == [v(1)]


async def test_an_inventory_that_changed_leaves_no_slots_behind(world: World) -> None:
    for step in (1, 2):
        world.publish(step)
    await world.sweeper().run()
    assert len(world.slots) == 1
    world.publish(3, columns=4)
    plan = await world.sweeper().run()
    assert world.slots == []
    (slot,) = [item for item in plan.items if "slots" in item.path and "other tensors" in item.reasons[0]][:1]
    assert not slot.keep


async def test_slots_of_a_trainer_that_is_gone_go_after_a_while(world: World) -> None:
    for step in (1, 2):
        world.publish(step)
    sweeper = world.sweeper(rules=SlotRules(ttl=100.0))
    await sweeper.run()
    world.clock.seconds = 99.0
    await sweeper.run()
    assert len(world.slots) == 1
    world.clock.seconds = 100.0
    plan = await sweeper.plan()
    assert [item.keep for item in plan.items if "slots" in item.path] == [False]
    assert len(world.slots) == 1, "a plan does nothing"
    await sweeper.run()
    assert world.slots == []


async def test_the_disk_budget_counts_slots(world: World) -> None:
    for step in (1, 2):
        world.publish(step)
    size = world.records[v(2)].files.bytes or 0
    await world.sweeper(rules=SlotRules(disk_budget=size + 100)).run()
    assert world.slots == []
    assert (world.root / RUN / "v000002").exists()


class Copies:
    """Copies for deltas, on the root, that nobody takes away."""

    bytes_on_root = 10**6

    async def plan(self) -> list[Reclaimable]:
        return []

    async def sweep(self) -> list[Reclaimable]:
        return []


async def test_the_disk_budget_counts_copies(world: World) -> None:
    """They are there for engines, so slots and older versions make room for them."""
    for step in (1, 2, 3):
        world.publish(step)
    size = world.records[v(3)].files.bytes or 0
    for room, kept in ((2, [v(2), v(3)]), (1, [v(3)])):
        budget = Copies.bytes_on_root + room * size
        rules = SlotRules(disk_budget=budget)
        await world.sweeper(last=2, rules=rules, budget=budget, copies=Copies()).run()
        assert (sorted(world.records), world.slots) == (kept, [])


async def test_a_dead_engine_may_still_read_what_is_deleted_and_never_what_is_recycled(world: World) -> None:
    for step in (1, 2):
        world.publish(step)
    dead = EngineView(id="e", run=RUN, state=EngineState.UNREACHABLE, serving=v(1), unreachable_for=1e6)
    world.seen = Views(engines=(dead,))
    plan = await world.sweeper().run()
    assert not (world.root / RUN / "v000001").exists()
    assert "engine e, which does not answer, may still serve it" in line(plan.items, 1).reasons[-1]
    assert world.slots == []


async def test_a_file_in_the_place_of_the_slots_is_told_and_the_sweep_goes_on(world: World) -> None:
    """Nothing is recycled, what nobody needs goes all the same, and nobody deletes what is not refitd's."""
    stray = world.root / ".refitd" / "slots"
    stray.write_text("no folder")
    for step in (1, 2, 3):
        world.publish(step)
    for plan in (await world.sweeper().plan(), await world.sweeper().run()):
        (told,) = [item for item in plan.items if item.path == ".refitd/slots"]
        assert told.keep
        assert "cannot be used (Not a directory)" in told.reasons[0]
    assert ".refitd/slots cannot be used" in line(plan.items, 2).reasons[-1]
    assert [path.name for path in sorted((world.root / RUN).glob("v*"))] == ["v000003"]
    assert list((world.root / ".refitd" / "trash").iterdir()) == []
    assert stray.read_text() == "no folder"


async def test_a_restarted_service_goes_by_the_slots_that_it_finds(world: World) -> None:
    for step in (1, 2):
        world.publish(step)
    await world.sweeper().run()
    (slot,) = world.slots
    (slot.parent / ".making-x").mkdir()
    plan = await world.sweeper().run()
    assert world.slots == [slot]
    assert [item.reasons for item in plan.items if ".making" in item.path] == [
        ["was being made when the service was killed"]
    ]
