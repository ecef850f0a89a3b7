"""A refit through the plugin: what is prepared before the pause, what is sent, what each answer leaves behind."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.port import Coming, Offered, Outcome, Reached, Refit, Stage, Target
from refitd.engine.transaction import ServerEngine
from refitd_plugin.memory.source import SourceRefusedError
from refitd_plugin.update.rank_engine import RankEngine
from support.engines import sglang_engine
from support.forged import write_delta
from support.mini_sglang import tiny_weights
from support.plugged_mini import PluggedMini, plugged_mini, put, target
from support.scripted_server import hang_up, silence

PAUSE, LOAD, RESUME = "/pause_generation", "/update_weights_from_disk", "/continue_generation"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def sglang(root: Path) -> Iterator[PluggedMini]:
    with plugged_mini(root) as engine:
        yield engine


def speaking_to(sglang: PluggedMini, root: Path | None, **options: Any) -> aclosing[ServerEngine]:
    return aclosing(sglang_engine(sglang.url, root=root, **options))


async def refit(engine: ServerEngine, wanted: Target) -> Refit:
    return await engine.refit(wanted, lambda _: None)


async def probed(engine: ServerEngine) -> Reached:
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    return seen


def prepared(sglang: PluggedMini) -> list[bool]:
    """Which ranks hold a version that waits for its load."""
    return [rank.engine._prepared is not None for rank in sglang.members]


async def test_a_version_is_checked_while_the_engine_serves_and_the_pause_is_the_load_alone(
    root: Path, sglang: PluggedMini
) -> None:
    put(root, 1)
    stages: list[tuple[Stage, list[bool]]] = []
    async with speaking_to(sglang, root) as engine:
        done = await engine.refit(target(root, 1), lambda stage: stages.append((stage, prepared(sglang))))
    assert (done.outcome, done.resumed, done.reason) == (Outcome.ACK, True, None)
    assert [stage for stage, _ in stages] == [Stage.PREPARE, Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME]
    assert dict(stages)[Stage.PAUSE] == [True]
    paused = sglang.calls[sglang.calls.index(PAUSE) :]
    assert paused == [PAUSE, LOAD, RESUME]  # neither checksums nor questions while nothing is generated
    assert sglang.bodies(LOAD)[0]["load_format"] == "auto"
    assert sglang.holds(1)
    assert prepared(sglang) == [False]


async def test_replicas_and_repeats_have_one_fingerprint_and_the_probe_finds_it_in_memory(
    root: Path, sglang: PluggedMini
) -> None:
    for step in (1, 2):
        put(root, step)
    async with speaking_to(sglang, root) as engine:
        first, second, again = [await refit(engine, target(root, step)) for step in (1, 2, 1)]
        assert await engine.fingerprint() == again.fingerprint
    assert first.fingerprint == again.fingerprint != second.fingerprint
    assert (first.fingerprint or "").startswith("plugin:xxh3:")
    async with speaking_to(sglang, root) as after_a_restart_of_the_service:
        await probed(after_a_restart_of_the_service)
        assert await after_a_restart_of_the_service.fingerprint() == first.fingerprint


async def test_a_record_that_sglang_made_says_nothing_of_what_the_plugin_computes(
    root: Path, sglang: PluggedMini
) -> None:
    put(root, 1)
    async with speaking_to(sglang, root) as engine:
        assert (await refit(engine, target(root, 1, fingerprint="xxh3:0"))).outcome is Outcome.ACK


async def test_what_a_rank_would_not_load_is_refused_without_a_pause(root: Path, sglang: PluggedMini) -> None:
    folder = put(root, 1)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2])
    async with speaking_to(sglang, root) as engine:
        done = await refit(engine, target(root, 1))
        assert (done.outcome, done.resumed) == (Outcome.NACK, True)
        assert "torn-file" in (done.reason or "")
        repair = await refit(engine, target(root, 1, repairs=True))
        assert (repair.outcome, repair.resumed) == (Outcome.TAINTED, False)
    assert sglang.changes == [RESUME]  # for an older debt: this refit has paused nothing
    assert sglang.holds(0)


async def test_one_rank_that_would_not_load_it_is_enough_and_the_others_let_go_of_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, 1)
    with plugged_mini(root, size=2) as sglang:
        looking = sglang.members[1].engine.preparing
        monkeypatch.setattr(looking, "known", lambda: (_ for _ in ()).throw(OSError("stale handle")))
        async with speaking_to(sglang, root) as engine:
            done = await refit(engine, target(root, 1))
        assert (done.outcome, done.resumed) == (Outcome.NACK, True)
        assert "stale handle" in (done.reason or "")
        assert LOAD not in sglang.changes
        assert prepared(sglang) == [False, False]


async def test_files_that_change_after_they_were_prepared_are_refused_and_the_engine_goes_on(
    root: Path, sglang: PluggedMini
) -> None:
    folder = put(root, 1)

    def on_stage(stage: Stage) -> None:
        if stage is Stage.LOAD:
            shutil.copy(folder / "model.safetensors", folder / "another.safetensors")

    async with speaking_to(sglang, root) as engine:
        done = await engine.refit(target(root, 1), on_stage)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "not what it was when it was prepared" in (done.reason or "")
    assert sglang.changes == [PAUSE, LOAD, RESUME]
    assert sglang.holds(0)


@pytest.mark.parametrize(
    ("other", "outcome", "reason", "holds"),
    [
        ({"digest": "xxh3:other"}, (Outcome.NACK, True), "is its root the folder that refitd has?", 0),
        ({"version": "run~v000009"}, (Outcome.TAINTED, False), "serves run~v000001, not run~v000009", 1),
    ],
)
async def test_another_folder_under_that_name_is_refused_and_an_answer_for_another_version_not_believed(
    root: Path, sglang: PluggedMini, other: dict[str, str], outcome: tuple[Outcome, bool], reason: str, holds: int
) -> None:
    put(root, 1)
    wanted = target(root, 1)
    assert wanted.files is not None
    async with speaking_to(sglang, root) as engine:
        done = await refit(engine, replace(wanted, files=replace(wanted.files, **other)))
    assert (done.outcome, done.resumed) == outcome
    assert reason in (done.reason or "")
    assert sglang.holds(holds)


async def test_bytes_are_read_once_more_only_where_the_files_are_not_the_very_same(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, 1)
    checks: list[bool] = []
    original = RankEngine.prepare

    def noted(self: Any, path: str, options: Any = None, *, check_bytes: bool | None = None, **more: Any) -> Any:
        checks.append(bool(check_bytes))
        return original(self, path, options, check_bytes=check_bytes, **more)

    monkeypatch.setattr(RankEngine, "prepare", noted)
    wanted = target(root, 1)
    assert wanted.files is not None
    async with speaking_to(sglang, root) as engine:
        assert (await refit(engine, wanted)).outcome is Outcome.ACK
        assert checks == [False]
        copied = replace(wanted, files=replace(wanted.files, signature="of files elsewhere"))
        assert (await refit(engine, copied)).outcome is Outcome.ACK
    assert checks == [False, False, True]


async def test_what_was_made_ready_before_its_verdict_is_not_looked_at_again_unless_it_has_changed(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(root, 1)
    asked: list[str] = []
    original = RankEngine.prepare

    def noted(self: Any, path: str, *args: Any, **more: Any) -> Any:
        asked.append(path)
        return original(self, path, *args, **more)

    monkeypatch.setattr(RankEngine, "prepare", noted)
    coming = Coming(version="run~v000001", path="run/v000001")
    async with speaking_to(sglang, root) as engine:
        await engine.probe()
        await engine.prefetch(coming)
        assert (prepared(sglang), sglang.changes, len(asked)) == ([True], [], 1)
        assert (await refit(engine, target(root, 1))).outcome is Outcome.ACK
        assert (sglang.holds(1), len(asked)) == (True, 1)
        await engine.prefetch(coming)
        os.utime(folder / "model.safetensors")
        assert (await refit(engine, target(root, 1))).outcome is Outcome.ACK
        assert len(asked) == 3


async def test_what_was_made_ready_for_nothing_is_closed(root: Path, sglang: PluggedMini) -> None:
    put(root, 1)
    async with speaking_to(sglang, root) as engine:
        await engine.probe()
        await engine.prefetch(Coming(version="run~v000001", path="run/v000001"))
        await engine.cancel_prefetch()
        assert prepared(sglang) == [False]


async def test_a_checkpoint_that_others_wrote_is_sglangs_own_and_proved_as_ever(
    root: Path, sglang: PluggedMini
) -> None:
    put(root, 1)
    async with speaking_to(sglang, root) as engine:
        await engine.probe()
        await engine.prefetch(Coming(version="run~v000001", path="run/v000001"))
        done = await refit(engine, target(root, 1, files=None))
        assert prepared(sglang) == [False]  # what it looked at ahead is nothing that it loads
    assert done.outcome is Outcome.ACK
    assert "/weights_checker" in sglang.calls


async def test_an_offer_that_was_looked_at_is_not_looked_at_again_and_another_one_is(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuses(_: Any, path: str, *__: Any, offer: str | None = None, **___: Any) -> Any:
        asked.append(offer or path)
        raise SourceRefusedError("withdrawn")

    monkeypatch.setattr(RankEngine, "prepare", refuses)
    offered = Offered(version="run~v000001", path="run/v000001", offer="run/.offer-1")
    async with speaking_to(sglang, root) as engine:
        await engine.probe()
        for taken in (offered, replace(offered, offer="run/.offer-2")):
            await engine.prefetch(offered)
            done = await refit(engine, Target(path=str(root / "run/v000001"), label="1", offered=taken))
            assert (done.outcome, "withdrawn" in (done.reason or "")) == (Outcome.NACK, True)
    assert asked == ["run/.offer-1", "run/.offer-1", "run/.offer-2"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_pause_that_breaks_off_leaves_nothing_prepared(
    root: Path, sglang: PluggedMini, *, is_cancelled: bool
) -> None:
    put(root, 1)
    paused = threading.Event()

    def broken(handler: BaseHTTPRequestHandler) -> None:
        assert prepared(sglang) == [True]
        paused.set()
        (silence if is_cancelled else hang_up)(handler)

    sglang.on(PAUSE, broken)
    async with speaking_to(sglang, root) as engine:
        running = asyncio.create_task(refit(engine, target(root, 1)))
        await asyncio.to_thread(paused.wait, 30)
        if is_cancelled:
            running.cancel()
        await asyncio.wait({running})
    assert prepared(sglang) == [False]
    assert sglang.changes == [PAUSE, RESUME]


async def test_a_service_that_stops_while_a_rank_prepares_has_paused_nothing(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, 1)
    begun, go_on = threading.Event(), threading.Event()
    looking = sglang.members[0].engine.preparing
    look = looking.ahead

    def slow(*args: Any, **more: Any) -> Any:
        begun.set()
        go_on.wait(30)
        return look(*args, **more)

    monkeypatch.setattr(looking, "ahead", slow)
    async with speaking_to(sglang, root) as engine:
        running = asyncio.create_task(refit(engine, target(root, 1)))
        await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sglang.changes == []
        # The rank is still at it. The next service waits for that, and is not told that the version is a bad one.
        async with speaking_to(sglang, root) as after_a_restart:
            next_one = asyncio.create_task(refit(after_a_restart, target(root, 1)))
            go_on.set()
            assert (await next_one).outcome is Outcome.ACK
    assert sglang.holds(1)


async def test_a_rank_that_does_not_get_ready_in_time_does_not_hold_up_the_update(
    root: Path, sglang: PluggedMini, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, 1)
    go_on = threading.Event()
    monkeypatch.setattr(RankEngine, "prepare", lambda *_, **__: go_on.wait(30))
    async with speaking_to(sglang, root, load_timeout=2) as engine:
        done = await refit(engine, target(root, 1))
    go_on.set()
    assert (done.outcome, sglang.holds(1)) == (Outcome.ACK, True)  # checked in the pause


async def test_without_a_channel_the_answer_of_the_plugin_still_counts(root: Path, sglang: PluggedMini) -> None:
    """As where the service and the engine do not share a host: the sockets are there, and nobody can be spoken to."""
    put(root, 1)
    async with speaking_to(sglang, None) as engine:
        seen = await probed(engine)
        assert (seen.plugin, "no root" in (seen.stock_reason or "")) == (None, True)
        done = await refit(engine, target(root, 1))
    assert (done.outcome, (done.fingerprint or "")[:7]) == (Outcome.ACK, "plugin:")
    assert sglang.holds(1)


async def test_a_rank_that_is_gone_when_it_is_asked_to_prepare_is_missed_and_looked_for(
    root: Path, sglang: PluggedMini
) -> None:
    put(root, 1)
    async with speaking_to(sglang, root) as engine:
        assert (await probed(engine)).plugin is not None
        sglang.members[0].socket.unlink()
        assert (await refit(engine, target(root, 1))).outcome is Outcome.ACK
        seen = await probed(engine)
        assert (seen.plugin, seen.stock_reason) == (None, "no plugin answers for it")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"random_seed": 8}, "no plugin answers for it"),
        ({"port": 30001}, "no plugin answers for it"),
        ({"pp_size": 2}, "the plugin stands aside: pipeline parallelism"),
        ({"fault": "REFITD_SGLANG_STAGE is 'on'"}, "the plugin stands aside: REFITD_SGLANG_STAGE is 'on'"),
    ],
)
async def test_an_engine_without_a_plugin_of_its_own_says_so(root: Path, args: dict[str, Any], reason: str) -> None:
    with plugged_mini(root, **args) as sglang:
        async with speaking_to(sglang, root) as engine:
            seen = await probed(engine)
            assert (seen.plugin, (seen.stock_reason or "")[: len(reason)]) == (None, reason)
            assert "refitd" not in seen.configuration.split()


async def test_an_engine_whose_release_of_the_plugin_speaks_otherwise_is_stock(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd_plugin.rank_plugin.PROTOCOL", 2)
    with plugged_mini(root) as sglang:
        async with speaking_to(sglang, root) as engine:
            seen = await probed(engine)
    assert seen.plugin is None
    assert "speaks protocol 2 and refitd 1" in (seen.stock_reason or "")


def put_delta(root: Path, step: int, *, base: int) -> tuple[Path, Any]:
    """A delta from the weights of the base's seed, and what comes of it."""
    before = tiny_weights(base)
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["q.weight"].view(-1)[3] += 1
    folder = root / "run" / f"v{step:06d}"
    write_delta(folder, "run", step, base, before, after)
    return folder, after


async def test_a_delta_that_does_not_lead_from_what_is_held_is_refused_without_a_pause_and_asks_for_a_full_version(
    root: Path, sglang: PluggedMini
) -> None:
    put_delta(root, 3, base=2)
    async with speaking_to(sglang, root) as engine:
        done = await refit(engine, target(root, 3, in_place=True))
    assert (done.outcome, done.resumed, done.needs_full) == (Outcome.NACK, True, True)
    assert sglang.changes == [RESUME]
    assert sglang.holds(0)


async def test_a_delta_that_fits_no_more_in_the_pause_asks_for_a_full_version_as_well(
    root: Path, sglang: PluggedMini
) -> None:
    async with speaking_to(sglang, root) as engine:
        for step in (1, 2):
            put(root, step)
            await refit(engine, target(root, step))
        put_delta(root, 3, base=2)

        def meddle(stage: Stage) -> None:
            if stage is Stage.PAUSE:
                sglang.members[0].model.down.data.mul_(2)

        done = await engine.refit(target(root, 3, in_place=True), meddle)
    assert (done.outcome, done.resumed, done.needs_full) == (Outcome.NACK, True, True)


async def test_without_its_plugin_an_engine_is_not_sent_a_delta(root: Path, sglang: PluggedMini) -> None:
    put_delta(root, 3, base=2)
    async with speaking_to(sglang, None) as engine:
        done = await refit(engine, target(root, 3, in_place=True))
    assert (done.outcome, done.needs_full) == (Outcome.NACK, True)
    assert LOAD not in sglang.changes
