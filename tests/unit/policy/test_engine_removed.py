"""An engine that is named no more while nobody knows what it holds or reads: that stays known of its address."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.engine.port import Outcome, Refit
from refitd.policy.keep import KeepRules, keep
from refitd.policy.leases import DEAD_AFTER, EngineView, Load, Views, leases
from refitd.policy.materialize import Copy, spare
from refitd.policy.spare_slots import why_not
from refitd.reclaim.books import Books
from refitd.root.scan import FoundFolder, Listing
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update import fleet
from refitd.update.targets import Targets
from refitd_client.contract.states import EngineState, Kind, VersionState
from refitd_client.contract.wire import NewEngine
from support.fleets import Stage, running
from support.records import version
from support.simulated_engine import SimulatedEngine

URL, NAME = "http://a:1", "a:1"
V1, V2 = version(1, owned=True), version(2, owned=True)
D2, D3 = (version(step, owned=True, kind=Kind.DELTA, base=f"run~v{step - 1:06d}") for step in (2, 3))
NEWER = version(9, owned=True)
LATE = Refit(outcome=Outcome.TAINTED, resumed=False, reason="it timed out")
REFUSED = Refit(outcome=Outcome.NACK, resumed=True, reason="no such shard")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "FILE_LOOK_SECONDS", 0.01)


def views(store: Store) -> Views:
    return Books(store, Targets(store), DiskFiles(Path("unused"))).views()


def may_be_recycled(store: Store) -> bool:
    return why_not(V2, replace(views(store), runs=())) is None


async def serve_one_and_begin_two(stage: Stage) -> asyncio.Event:
    """Engine a serves version 1 and is in the middle of loading version 2."""
    engine = stage.engines["a"]
    stage.store.put_version(V1)
    stage.fleet.add(NewEngine(url=URL))
    await stage.until(lambda: stage.store.engines[NAME].serving == V1.id)
    engine.gate = asyncio.Event()
    stage.store.put_version(V2)
    await stage.until(lambda: len(engine.loads) == 2)
    return engine.gate


async def serve_one_and_begin_to_take_two(stage: Stage) -> asyncio.Event:
    """The same, and version 2 has no files yet: it is in its trainer's memory."""
    engine, offered = stage.engines["a"], V2.having(state=VersionState.ANNOUNCED, handed=True)
    engine.takes_offers = True
    stage.store.put_version(V1)
    stage.fleet.add(NewEngine(url=URL))
    await stage.until(lambda: stage.store.engines[NAME].serving == V1.id)
    engine.gate = asyncio.Event()
    stage.store.put_version(offered)
    stage.targets.offer(offered, "run/.offer")
    await stage.until(lambda: engine.taken == [V2.id])
    return engine.gate


def stage_in(folder: Path) -> AbstractAsyncContextManager[Stage]:
    nobody = folder / "engines.yaml"
    nobody.write_text("engines: []")
    return running(folder / "state", {"a": SimulatedEngine()}, engines_file=nobody)


async def ready(stage: Stage) -> None:
    await stage.until(lambda: stage.store.faults.fleet is None)


async def test_a_load_without_a_proven_end_keeps_its_lease_when_its_engine_is_named_no_more(tmp_path: Path) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        stage.engines["a"].script = [LATE]
        gate.set()
        await stage.until(lambda: stage.store.engines[NAME].debts.unproven == (V2.id,))
        stage.fleet.remove(NAME)
        assert NAME not in stage.store.engines
        assert not may_be_recycled(stage.store)
    again = Store(Journal(tmp_path / "state"), SystemClock())
    assert again.engines == {}
    assert not may_be_recycled(again), "a restart forgot it"


async def test_an_engine_that_is_removed_in_mid_load_leaves_what_its_time_out_says(tmp_path: Path) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        stage.engines["a"].script = [LATE]
        stage.fleet.remove(NAME)
        gate.set()
        await stage.until(lambda: stage.engines["a"].closed)
        assert stage.store.loading == {}
        assert not may_be_recycled(stage.store)


async def test_a_service_that_dies_while_a_removed_engine_loads_knows_it_afterwards(tmp_path: Path) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        stage.fleet.remove(NAME)
        await stage.store.durable()
        state = tmp_path / "as-it-was"
        state.mkdir()
        for file in (tmp_path / "state").glob("journal.db*"):
            (state / file.name).write_bytes(file.read_bytes())
        gate.set()
    assert not may_be_recycled(Store(Journal(state), SystemClock()))


@pytest.mark.parametrize("end", [Refit(outcome=Outcome.ACK, resumed=True), REFUSED])
async def test_a_removed_engine_whose_load_ended_well_leaves_nothing(tmp_path: Path, end: Refit) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        stage.engines["a"].script = [end]
        stage.fleet.remove(NAME)
        assert not may_be_recycled(stage.store)
        gate.set()
        await stage.until(lambda: stage.engines["a"].closed)
        assert may_be_recycled(stage.store)
        assert stage.store.removed == {}


@pytest.mark.parametrize(
    ("end", "left"), [(Refit(outcome=Outcome.ACK, resumed=True), ()), (REFUSED, ()), (LATE, (V2.id,))]
)
async def test_an_engine_that_is_removed_while_it_takes_an_offer_holds_up_no_trainer_and_leaves_what_its_end_says(
    tmp_path: Path, end: Refit, left: tuple[str, ...]
) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_to_take_two(stage)
        assert stage.targets.is_offered(V2)
        stage.engines["a"].script = [end]
        stage.fleet.remove(NAME)
        assert not stage.targets.is_offered(V2)
        gate.set()
        await stage.until(lambda: stage.engines["a"].closed)
        assert stage.store.loading == {}
        assert [version for record in stage.store.removed.values() for version in record.debts.unproven] == [*left]


@pytest.mark.parametrize(
    ("end", "is_free"), [(Refit(outcome=Outcome.ACK, resumed=True), True), (REFUSED, True), (LATE, False)]
)
async def test_a_removed_engine_keeps_what_its_deltas_were_written_into_until_its_load_has_ended(
    tmp_path: Path, end: Refit, is_free: bool
) -> None:
    """Its plugin would put them back from there, and from the delta that it may still read there is a way to that."""
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        engine = stage.engines["a"]
        engine.plugin = "0.1.0"
        stage.store.put_version(V1)
        stage.fleet.add(NewEngine(url=URL))
        await stage.until(lambda: stage.store.engines[NAME].serving == V1.id)
        for delta in (D2, D3):
            engine.gate = asyncio.Event() if delta is D3 else None
            stage.store.put_version(delta)
            await stage.until(lambda delta=delta: engine.loads[-1].endswith(delta.path))
            if delta is D2:
                await stage.until(lambda: stage.store.engines[NAME].contents.beneath == V1.id)
        stage.fleet.remove(NAME)
        held = replace(views(stage.store), runs=())
        assert (V1.id in leases(held), D3.id in leases(held)) == (True, True)
        assert "would be put back from it" in (why_not(V1, held) or "")
        engine.script = [end]
        assert engine.gate is not None
        engine.gate.set()
        await stage.until(lambda: engine.closed)
        held = leases(replace(views(stage.store), runs=()))
        listing = Listing((FoundFolder(run="run", order=V1.order, path=V1.path),), frozenset({"run"}))
        verdicts = keep([NEWER, D3, D2, V1], held, KeepRules(last=1), listing=listing, ages={})
        kept = [verdict.record for verdict in verdicts if verdict.keep]
        assert kept == ([NEWER] if is_free else [NEWER, D3, D2, V1])


@pytest.mark.parametrize("name", [NAME, "another-name"])
async def test_an_engine_that_is_named_again_is_proved_before_it_is_told_to_go_on(tmp_path: Path, name: str) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        engine = stage.engines["a"]
        engine.script, repair = [LATE, REFUSED], asyncio.Event()
        gate.set()
        engine.gate = repair
        await stage.until(lambda: len(engine.loads) == 3)
        stage.fleet.remove(NAME)
        repair.set()
        await stage.until(lambda: engine.closed)
        resumes, engine.gate = engine.resumes, asyncio.Event()
        stage.fleet.add(NewEngine(url=URL, id=name))
        record = stage.store.engines[name]
        assert (record.known, record.debts.unproven, record.serving) == (False, (V2.id,), None)
        assert stage.store.removed == {}
        await stage.until(lambda: len(engine.loads) == 4)
        assert engine.resumes == resumes, "it was told to go on with unknown contents"
        assert not may_be_recycled(stage.store)


async def test_an_engine_that_is_named_anew_while_its_old_load_ends_badly_hears_of_that(tmp_path: Path) -> None:
    async with stage_in(tmp_path) as stage:
        await ready(stage)
        gate = await serve_one_and_begin_two(stage)
        stage.engines["a"].script = [LATE]
        stage.fleet.remove(NAME)
        stage.store.put_engine(stage.store.removed[URL].having(id="heir", removed=False, known=True, unproven=()))
        gate.set()
        await stage.until(lambda: stage.store.loading == {})
        heir = stage.store.engines["heir"]
        assert (heir.state, heir.known, heir.debts.unproven) == (EngineState.TAINTED, False, (V2.id,))


def test_what_a_removed_engine_may_read_is_deleted_after_a_while_and_never_written_over() -> None:
    view = EngineView(
        id=URL, run="run", state=EngineState.UNREACHABLE, loads=(Load(version=V2.id, unproven=True),), is_removed=True
    )
    copy = Copy(run="run", name="one", path="copies/one", bytes=1, order=V2.order, digest="digest", signature="s")
    for gone_for, is_kept in ((0.0, True), (DEAD_AFTER, False)):
        seen = Views(engines=(replace(view, unreachable_for=gone_for),))
        assert (V2.id in leases(seen)) is is_kept
        assert "may still be reading" in (why_not(V2, seen) or "")
        assert [verdict.keep for verdict in spare([copy], seen, {})] == [is_kept]
