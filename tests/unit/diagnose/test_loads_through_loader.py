"""An engine whose plugin cannot replay loads: the service says so, and why, and takes it back when that is over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from refitd.cli import render
from refitd.engine.port import LoaderUse, Reached
from refitd.policy.observe import after_probe
from refitd_client.contract.plugin import ASIDE, Handshake, LoadPlan
from refitd_doctor.engines import EngineAnswers, judge_engine
from refitd_doctor.finding import CheckName, CheckVerdict, Finding
from refitd_inside.client import EngineRankGroup, Member
from refitd_plugin.update.recorder import Recorder
from support.engines import sglang_engine
from support.mini_sglang import TinyModel
from support.plugged_mini import plugged_mini, put, target
from support.records import engine
from support.services import serving
from support.stand_in_service import make_engine

WHY = "the loader works in threads"
WHOLE = LoaderUse(whole=True, reason=WHY)
PART = LoaderUse(whole=False, reason="9 tensors are not only copied")
SEEN = Reached(
    model_path="/m",
    weight_version="1",
    server="SGLang",
    server_version="0.5.23",
    configuration="c",
    startup_path="/m",
    plugin="0.1.0",
)


async def loaders(root: Path, steps: int) -> list[LoaderUse | None]:
    """What a service sees of an engine before its first load, and after each."""
    with plugged_mini(root) as sglang:
        service = sglang_engine(sglang.url, root=root)
        found: list[LoaderUse | None] = []
        for step in range(steps + 1):
            if step:
                put(root, step)
                assert (await service.refit(target(root, step), lambda _: None)).reason is None
            seen = await service.probe()
            assert isinstance(seen, Reached)
            found.append(seen.loader)
        await service.aclose()
    return found


async def test_after_the_first_load_the_service_knows_what_is_not_only_copied(tmp_path: Path) -> None:
    part = LoaderUse(whole=False, reason="1 tensor is not only copied")
    assert await loaders(tmp_path / "root", 2) == [None, part, part]


async def test_a_model_of_copies_alone_has_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyModel, "_load_norm", lambda self, tensor: self.norm.data.copy_(tensor))
    assert await loaders(tmp_path / "root", 2) == [None, None, None]


async def test_a_load_that_cannot_be_repeated_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_of = Recorder.__exit__

    def give_up(self: Recorder, *error: Any) -> None:
        self.give_up(WHY)
        exit_of(self, *error)

    monkeypatch.setattr(Recorder, "__exit__", give_up)
    assert await loaders(tmp_path / "root", 2) == [None, WHOLE, WHOLE]


async def test_what_was_said_is_taken_back_when_a_plan_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyModel, "_load_norm", lambda self, tensor: self.norm.data.copy_(tensor))
    root = tmp_path / "root"
    with plugged_mini(root) as sglang:
        service = sglang_engine(sglang.url, root=root)
        for step, loader in ((1, None), (2, "it has learned no load plan from its last load"), (3, None)):
            put(root, step)
            await service.refit(target(root, step), lambda _: None)
            if step == 2:  # as after a load that failed: the plan is thrown away
                sglang.members[0].engine.loading.plan = None
                service.plugin.was_loaded("load")
            seen = await service.probe()
            assert isinstance(seen, Reached)
            assert (None if seen.loader is None else seen.loader.reason) == loader
        await service.aclose()


@pytest.mark.parametrize(
    ("plans", "loader"),
    [
        ([None, None], None),
        (
            [LoadPlan(replays=True), LoadPlan(replays=True, loader=9)],
            PART,
        ),
        ([LoadPlan(replays=True, loader=9), LoadPlan(replays=False, reason=WHY)], WHOLE),
        ([LoadPlan(replays=False, reason="\x1b[2J"), LoadPlan(replays=True)], LoaderUse(whole=True, reason="\\x1b[2J")),
    ],
)
def test_of_several_ranks_the_slowest_counts(plans: list[LoadPlan | None], loader: LoaderUse | None) -> None:
    handshake = Handshake(plugin="0.1.0", sglang="0.5.23", state="on", host="h", port=1, rank=0, ranks=2)
    rank_group = EngineRankGroup(
        tuple(Member(f"{n}", replace_plan(handshake, n, plan)) for n, plan in enumerate(plans)), "0.1.0"
    )
    assert rank_group.seen.loader == loader


def doctor_says(seen: Reached) -> Finding:
    asked = EngineAnswers(name="e", url="http://10.0.0.7:30000", seen=seen)
    return {each.check: each for each in judge_engine(asked)}[CheckName.PLUGIN]


def as_text(shown: object) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def replace_plan(handshake: Handshake, rank: int, plan: LoadPlan | None) -> Handshake:
    return Handshake(
        plugin=handshake.plugin, sglang=handshake.sglang, state="on", host="h", port=1, rank=rank, ranks=2, plan=plan
    )


def test_the_record_the_tables_and_doctor_say_why() -> None:
    record = after_probe(engine(plugin="0.1.0"), replace(SEEN, loader=WHOLE), None, None, 0.0)
    assert record.seen.loader == LoaderUse(whole=True, reason=WHY)
    plain = "checkpoints without refit.json as well"
    assert record.how_it_loads == (
        f"loads through refitd's plugin 0.1.0, {plain}, each version through SGLang's loader: {WHY}"
    )
    shown = make_engine(plugin="0.1.0", through_loader=WHY, loads_whole=True)
    row = as_text(render.engines_table([shown], {}))
    assert " loader " in row
    assert f"each load goes through SGLang's loader: {WHY}" in row
    told = doctor_says(replace(SEEN, loader=WHOLE))
    assert (told.verdict, WHY in told.text) == (CheckVerdict.WARNING, True)
    assert "RefitdLoadsThroughLoader" in str(told.fix)


def test_some_tensors_of_a_model_are_no_warning() -> None:
    record = after_probe(engine(plugin="0.1.0"), replace(SEEN, loader=PART), None, None, 0.0)
    assert record.how_it_loads.endswith("a part of each version through SGLang's loader: 9 tensors are not only copied")
    shown = make_engine(plugin="0.1.0", through_loader=PART.reason)
    assert " plugin " in as_text(render.engines_table([shown], {}))
    assert doctor_says(replace(SEEN, loader=PART)).verdict is CheckVerdict.OK


async def test_metrics_explain_and_the_api_say_it(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        stage.engines["a"].plugin, stage.engines["a"].loader = "0.1.0", WHOLE
        await stage.served(1)
        await stage.until("run~v000001", lambda _: stage.store.engines["a:1"].seen.loader is not None)
        text = (await stage.http.get("/metrics")).text
        listed = {each["id"]: each for each in (await stage.http.get("/v1/engines")).json()["items"]}
        sentences = (await stage.http.get("/v1/explain/a:1")).json()["sentences"]
    found = {
        tuple(sample.labels[label] for label in ("engine", "tensors")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "refitd_engine_through_loader"
    }
    assert found == {("a:1", "all"): 1, ("a:1", "some"): 0, ("b:1", "all"): 0, ("b:1", "some"): 0}
    assert [listed[name]["through_loader"] for name in ("a:1", "b:1")] == [WHY, None]
    assert any(WHY in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("reason", "is_fault"),
    [
        (f"{ASIDE}: REFITD_SGLANG_STAGE is 'on': it may be auto or off", True),
        (
            "no plugin answers for it; its channel was not opened: rank 1 says: REFITD_SGLANG_STAGE is 'on': no",
            True,
        ),
        (f"{ASIDE}: --enable-lora", False),
        ("no plugin answers for it", False),
    ],
)
def test_a_variable_that_is_wrong_inside_an_engine_is_a_fault_in_the_tables_and_for_doctor(
    reason: str, is_fault: bool
) -> None:
    shown = make_engine(stock_reason=reason)
    assert ("stands aside: REFITD_SGLANG_STAGE is 'on'" in as_text(render.engines_table([shown], {}))) == is_fault
    told = doctor_says(replace(SEEN, plugin=None, stock_reason=reason))
    assert (told.verdict is CheckVerdict.FAILED) == is_fault


async def test_a_variable_that_is_wrong_inside_an_engine_raises_a_metric(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        stage.engines["a"].stock_reason = f"{ASIDE}: REFITD_SGLANG_STAGE is 'on'"
        await stage.served(1)
        text = (await stage.http.get("/metrics")).text
    found = {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "refitd_engine_plugin_fault"
    }
    assert found == {"a:1": 1, "b:1": 0}
