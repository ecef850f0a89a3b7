"""Who keeps a run from being deleted, and that the refusal says what to do."""

from typing import Any

import pytest

from refitd.policy.leases import EngineView, Load, RunView, Views, why_not_deleted
from refitd_client.contract.states import EngineState, VersionState
from support.records import version

ONE, TWO = version(1), version(2)


def view(run: str | None = "other", **fields: Any) -> EngineView:
    return EngineView(id="a", run=run, state=EngineState.IN_SYNC, **fields)


def asked(*engines: EngineView, spared: tuple[str, ...] = (), is_published: bool = False, **views: Any) -> str | None:
    run = RunView(run="run", target=TWO.id, last_good=ONE.id)
    seen = Views(engines=engines, runs=(run,), **views)
    return why_not_deleted("run", [TWO, ONE], seen, spared, is_published=is_published)


def test_a_run_that_nobody_needs_may_go_although_its_target_has_leases() -> None:
    assert asked() is None
    assert asked(view(serving="other~v000001")) is None


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (asked(is_published=True), "a publisher holds run run: end its trainer"),
        (
            asked(view("run")),
            "a follows run run: bring engines to another run",
        ),
        (asked(view(serving=ONE.id)), "run~v000001 is needed (engine a serves it)"),
        (asked(view(loads=(Load(version=ONE.id),))), "engine a loads it"),
        (asked(view(loads=(Load(version=ONE.id, unproven=True),))), "engine a may still be reading it"),
        (asked(pulling=(("host", ONE.id),)), "follower host pulls it"),
        (asked(validating=(TWO.id,)), "the catalog is validating it"),
        (
            asked(spared=("run/checkpoint-1",)),
            "only its trainer deletes run/checkpoint-1: delete these folders by hand",
        ),
    ],
)
def test_who_needs_a_run_is_named_with_what_to_do(why: str | None, told: str) -> None:
    assert why is not None
    assert told in why
    assert len(why) <= 240


def test_pins_and_versions_without_a_verdict_are_named() -> None:
    pinned = why_not_deleted("run", [version(3, pinned=True)], Views(), (), is_published=False)
    assert pinned == "pinned: run~v000003. Take the pins away first ('refitd unpin ID')"
    settling = why_not_deleted("run", [version(3, state=VersionState.SETTLING)], Views(), (), is_published=False)
    assert settling == "no verdict yet: run~v000003. Wait for it ('refitd wait ID --for sealed')"
    assert why_not_deleted("run", [version(3, state=VersionState.UNKNOWN)], Views(), (), is_published=False) is None
