"""Hub and followers are not upgraded in one moment: a follower of an older release is led as those of the hub's own."""

from pathlib import Path

import httpx

from refitd_client.contract.states import EngineState, WaitOutcome
from support.hosts import RUN, Hosts, hosts, until
from support.older_release import translated
from support.sockets import free_port


def test_a_follower_of_an_older_release_pulls_is_led_goes_back_and_outlives_its_hub(tmp_path: Path) -> None:
    with hosts(tmp_path, "--take-followers", "--quorum", "2") as all_, translated(all_.hub.refitd.url) as hub_of_then:
        port = free_port()
        with translated(f"http://127.0.0.1:{port}") as told:
            flags = ("--follower", "old", "--advertise", told)
            old = all_.host("old", "--follow", hub_of_then, *flags)
            old.refitd.port = port
            with old.refitd:
                hub, new = all_.hub, all_.led("new")
                until(lambda: {each.id for each in hub.client.engines().items} == {"old", "new"}, hub, old, new)
                assert "orders" not in told_by(told)
                first = served(all_, 1)
                served(all_, 2)
                assert old.serves(2)
                hub.client.rollback(RUN, first)
                until(lambda: old.serves(1) and new.serves(1), hub, old, new)
                until(lambda: hub.client.engine("old").version == first, hub, old)
                hub.refitd.kill()
                hub.refitd.start()
                served(all_, 3)
                assert old.serves(3)
                assert hub.client.engine("old").state is EngineState.IN_SYNC


def served(all_: Hosts, step: int) -> str:
    """Publish a step, and wait until all hosts are proved to serve it."""
    version = all_.publish(step)
    result = all_.hub.client.wait(version, timeout=30)
    assert result.outcome is WaitOutcome.SERVED, result
    return version


def told_by(url: str) -> dict[str, object]:
    """What a follower says of itself."""
    return httpx.get(f"{url}/v1/follow", timeout=30, trust_env=False).json()
