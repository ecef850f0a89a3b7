"""A hub sees its followers as engines: real services, of which the hub orders what the others serve."""

from pathlib import Path

from refitd_client.contract.states import EngineState, WaitOutcome
from support.hosts import RUN, Host, hosts, until


def states(hub: Host) -> dict[str, tuple[str, str | None]]:
    """Each host's state at the hub, and the version that it is proved to serve."""
    return {engine.id: (engine.state.value, engine.version) for engine in hub.client.engines().items}


def on_host(hub: Host, name: str) -> list[str | None]:
    """What the engines of a host serve, as the hub says."""
    host = hub.client.engine(name).host
    return [] if host is None else [engine.version for engine in host.engines]


def test_hosts_name_themselves_are_rolled_out_to_and_rolled_back_by_the_hub(tmp_path: Path) -> None:
    with hosts(tmp_path, "--quorum", "2") as all_:
        hub, one, other = all_.hub, all_.led("one", engines=2), all_.led("other")
        until(lambda: set(states(hub)) == {"one", "other"}, hub, one, other)
        first = all_.publish(1)
        assert hub.client.wait(first, timeout=30).outcome is WaitOutcome.SERVED
        assert one.serves(1)
        assert other.serves(1)
        assert states(hub) == dict.fromkeys(("one", "other"), (EngineState.IN_SYNC.value, first))
        until(lambda: on_host(hub, "one") == [first, first], hub, one)
        assert "checksums of tensors, of the host's engines" in (hub.client.engine("other").proof or "")
        second = all_.publish(2)
        assert hub.client.wait(second, timeout=30).outcome is WaitOutcome.SERVED
        hub.client.rollback(RUN, first)
        until(lambda: one.serves(1) and other.serves(1), hub, one, other)
        until(lambda: states(hub)["one"] == ("IN_SYNC", first) == states(hub)["other"], hub, one, other)


def test_a_canary_host_that_refuses_keeps_a_version_from_all_other_hosts(tmp_path: Path) -> None:
    flags = ("--strategy", "canary:bird")
    with hosts(tmp_path, *flags) as all_:
        hub, bird, other = all_.hub, all_.led("bird"), all_.led("other")
        until(lambda: set(states(hub)) == {"bird", "other"}, hub, bird, other)
        first = all_.publish(1)
        until(lambda: bird.serves(1) and other.serves(1), hub, bird, other)
        until(lambda: states(hub)["other"] == ("IN_SYNC", first) == states(hub)["bird"], hub, bird, other)
        bird.engines[0].refuses = True
        second = all_.publish(2)
        until(lambda: hub.client.version(second).barred, hub, bird, other)
        assert any("the canary bird refused it" in sentence for sentence in hub.client.explain(second).sentences)
        until(lambda: states(hub)["other"] == ("IN_SYNC", first) == states(hub)["bird"], hub, bird, other)
        assert bird.serves(1)
        assert other.serves(1)
        assert not any("v000002" in path for path in other.engines[0].loaded)
        bird.engines[0].refuses = False
        third = all_.publish(3)
        until(lambda: states(hub)["other"] == ("IN_SYNC", third) == states(hub)["bird"], hub, bird, other)
