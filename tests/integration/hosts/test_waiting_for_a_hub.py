"""What a follower says while its hub is silent, has paused the run, or brings other hosts there first."""

import json
from pathlib import Path
from typing import Any

from refitd_client import WeightPublisher
from refitd_client.contract.states import EngineState, Standing, WaitOutcome
from support.checkpoints import tensors
from support.command_line import refitd
from support.hosts import RUN, Host, hosts, until


def told(host: Host) -> dict[str, str]:
    """What each command prints for people at a host, without the ends of lines."""
    (engine,) = host.client.engines().items
    commands = ("status", "engines", f"explain {engine.id}", f"explain {RUN}", "top --once")
    return {each: " ".join(refitd(*each.split(), "--url", host.refitd.url).stdout.split()) for each in commands}


def shown(command: str, host: Host) -> Any:
    return json.loads(refitd(command, "--json", "--url", host.refitd.url).stdout)


def test_a_follower_whose_hub_is_dead_says_since_when_it_has_heard_nothing_and_not_that_it_is_current(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, all_.led("one")
        until(lambda: len(hub.client.engines().items) == 1, hub, one)
        assert hub.client.wait(all_.publish(1), timeout=30).outcome is WaitOutcome.SERVED
        until(lambda: one.client.overview().runs[0].standing is Standing.CURRENT, one)
        hub.refitd.kill()
        until(lambda: one.client.overview().runs[0].standing is Standing.TROUBLED, one)
        since = one.following()["heard_at"]
        silent = f"Nothing was heard from {hub.refitd.url} since {since}"
        for command, text in told(one).items():
            assert silent in text, command
            assert "CURRENT" not in text, command
            assert "step 1, the newest" not in text, command
        (run,) = shown("status", one)["runs"]
        assert (run["standing"], run["reasons"][0].startswith(silent)) == ("TROUBLED", True)
        (engine,) = shown("engines", one)["items"]
        assert (engine["state"], engine["reason"].startswith(silent)) == ("IN_SYNC", True)
        hub.refitd.start()
        until(lambda: one.client.overview().runs[0].standing is Standing.CURRENT, hub, one)
        assert not any("Nothing was heard" in text for text in told(one).values())


def test_a_follower_whose_hub_has_paused_the_run_says_so_and_that_it_is_paused(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, all_.led("one")
        until(lambda: len(hub.client.engines().items) == 1, hub, one)
        assert hub.client.wait(all_.publish(1), timeout=30).outcome is WaitOutcome.SERVED
        hub.client.pause(RUN)
        all_.publish(2)
        until(lambda: one.client.overview().runs[0].standing is Standing.PAUSED, hub, one)
        why = f"{hub.refitd.url} has paused the run: this host goes to nothing newer before it is resumed there"
        for command, text in told(one).items():
            assert why in text, command
        assert shown("engines", one)["items"][0]["reason"] == why
        hub.client.resume(RUN)
        until(lambda: one.serves(2) and one.client.overview().runs[0].standing is Standing.CURRENT, hub, one)
        assert not any("has paused" in text for text in told(one).values())


def test_a_host_whose_turn_it_is_not_says_that_it_waits_for_its_hubs_order(tmp_path: Path) -> None:
    flags = ("--strategy", "canary:bird")
    with hosts(tmp_path, *flags) as all_:
        hub, bird, other = all_.hub, all_.led("bird"), all_.led("other")
        until(lambda: len(hub.client.engines().items) == 2, hub, bird, other)
        assert hub.client.wait(all_.publish(1), timeout=30).outcome is WaitOutcome.SERVED
        until(lambda: other.client.overview().runs[0].standing is Standing.CURRENT, hub, bird, other)
        bird.engines[0].may_load.clear()
        all_.publish(2)
        hears = f"engines load it when {hub.refitd.url} orders it, which may bring other hosts there first"
        why = f"Step 2 is here and good: {hears}"
        until(lambda: why in other.client.overview().runs[0].reasons, hub, bird, other)
        assert other.client.overview().runs[0].standing is Standing.MOVING
        for command, text in told(other).items():
            assert why in text, command
        until(lambda: bird.client.engines().items[0].state is EngineState.UPDATING, hub, bird, other)
        assert not any("orders it" in reason for reason in bird.client.overview().runs[0].reasons)
        bird.engines[0].may_load.set()
        until(lambda: other.serves(2), hub, bird, other)


def test_a_follower_of_a_hub_with_several_runs_says_that_one_has_to_be_named(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub = all_.hub
        for run in ("a", "b"):
            with WeightPublisher(hub.root, run, hub.refitd.url) as publisher:
                publisher.publish(tensors(1), step=1)
        one = all_.follower("one")
        several = "the upstream has several runs (a, b): name one with --run"
        until(lambda: one.get("/v1/overview").json()["faults"]["upstream"] == several, hub, one)
