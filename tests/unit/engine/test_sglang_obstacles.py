"""Options of SGLang that an update would break are refused by name, before anything is paused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from refitd.engine.plugin import Launch, PluginSeen
from refitd.engine.port import Outcome, Reached, Refit, Target
from support.engines import sglang_engine
from support.scripted_sglang import ScriptedSglang, scripted_sglang

TARGET = Target(path="/root/v7", label="7")
DRAFT = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/draft"}


@contextmanager
def started(version: str = "0.5.23", **told: Any) -> Iterator[ScriptedSglang]:
    with scripted_sglang(version=version, told=told) as sglang:
        yield sglang


async def updated(sglang: ScriptedSglang, *, plugged: bool = False) -> tuple[Reached, Refit]:
    engine = sglang_engine(sglang.url)
    if plugged:

        async def look(launch: Launch) -> None:
            engine.plugin.seen = PluginSeen(release="0.1.0")

        engine.plugin.look = look  # pyright: ignore[reportPrivateUsage]
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    return seen, await engine.refit(TARGET, lambda _: None)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"pp_size": 2}, "2 pipeline stages"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"disaggregation_mode": "prefill"}, "name it in the engines file together with its decode servers"),
        ({"disaggregation_mode": "decode"}, "name it in the engines file together with its prefill servers"),
        ({"kt_weight_path": "/experts"}, "start it without --kt-weight-path"),
        ({"weight_cache_mode": "client"}, "start it without --weight-cache-mode"),
        ({"enable_elastic_expert_backup": True}, "start it without --enable-elastic-expert-backup"),
        ({"enable_paged_experts": True}, "start it without --enable-paged-experts"),
        (DRAFT, "its own update would load each version into its draft model /draft as well"),
    ],
)
async def test_what_an_update_would_break_is_refused_by_name_and_nothing_is_paused(
    told: dict[str, Any], why: str
) -> None:
    with started(**told) as sglang:
        seen, done = await updated(sglang)
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert why in (done.reason or "")
    assert [why in f"{each.text}: {each.fix}" for each in seen.obstacles if each.blocks] == [True]
    assert sglang.changes == ["/continue_generation"]


@pytest.mark.parametrize(
    "told",
    [
        {"disaggregation_mode": "null", "enable_eplb": False, "pp_size": 1},
        {"dp_size": 1, "tp_size": 2, "enable_dp_attention": True},
        {"speculative_algorithm": "NGRAM"},
        {"init_expert_location": "/experts.json"},
        {"kt_weight_path": None, "weight_cache_mode": "off", "enable_paged_experts": False},
    ],
)
async def test_other_options_hinder_no_update(told: dict[str, Any]) -> None:
    with started(**told) as sglang:
        seen, done = await updated(sglang)
    assert (done.outcome, seen.obstacles, seen.draft) == (Outcome.ACK, (), None)


async def test_a_draft_model_of_its_own_is_left_as_started_with_refitd_inside_and_that_is_said() -> None:
    with started(**DRAFT) as sglang:
        seen, done = await updated(sglang, plugged=True)
    assert (done.outcome, seen.draft) == (Outcome.ACK, "left as started")
    assert [(each.blocks, "draft: left as started" in each.text) for each in seen.obstacles] == [(False, True)]


@pytest.mark.parametrize("path", [None, "/base"])
async def test_draft_layers_in_the_models_own_checkpoint_are_updated_with_it(path: str | None) -> None:
    with started(speculative_algorithm="EAGLE", speculative_draft_model_path=path) as sglang:
        seen, done = await updated(sglang)
    assert (done.outcome, seen.draft, seen.obstacles) == (Outcome.ACK, "updated with the model", ())


async def test_a_start_up_model_that_an_old_release_forgets_is_not_taken_for_another_draft() -> None:
    with started(version="0.5.17", speculative_algorithm="EAGLE", speculative_draft_model_path="/base") as sglang:
        engine = sglang_engine(sglang.url)
        await engine.probe()
        sglang.launched = "/root/v6"  # which it has loaded since
        sglang.served = {"model_path": "/root/v6", "weight_version": "6"}
        seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.draft, seen.obstacles) == ("updated with the model", ())
