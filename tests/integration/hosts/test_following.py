"""A refitd follows another: versions come to its own root, are checked there again, and go to its own engines."""

from pathlib import Path

import pytest

from refitd_client import ConflictError, RunBusyError, WeightPublisher
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Notice
from support.checkpoints import tensors
from support.hosts import RUN, hosts, until
from support.proxy import Fault, Hold, Proxy
from support.published import check, versions


def test_a_follower_whose_upstream_is_gone_serves_on_from_its_own_root_and_says_since_when(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        one = all_.follower("one")
        all_.publish(1)
        until(lambda: one.serves(1), all_.hub, one)
        all_.hub.refitd.kill()
        one.refitd.restart()
        one.engines[0].served = {"model_path": "/base", "weight_version": "default"}  # it was restarted as well
        until(lambda: one.serves(1), one)
        until(lambda: one.following()["fault"] is not None, one)
        assert "nothing was heard from an upstream since the start" in one.following()["fault"]
        assert one.client.overview().faults.upstream == one.following()["fault"]
        assert one.client.ready()
        all_.hub.refitd.start()
        all_.publish(2)
        until(lambda: one.serves(2) and one.following()["fault"] is None, one)


def test_the_next_upstream_is_followed_where_one_is_gone(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        gone = "http://127.0.0.1:9"
        one = all_.follower("one", "--follow", gone)
        all_.publish(1)
        until(lambda: one.serves(1), one)
        assert one.following()["upstreams"] == [gone, all_.hub.refitd.url]
        assert one.following()["upstream"] == all_.hub.refitd.url


def test_a_rollback_at_the_hub_is_followed_also_to_a_version_that_was_collected_here(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        one = all_.follower("one", "--keep-last", "1", "--slots", "0")
        for step in (1, 2, 3):
            all_.publish(step)
            until(lambda step=step: one.serves(step), one)
        until(lambda: not (one.root / RUN / "v000001").exists(), one)
        all_.hub.client.rollback(RUN, f"{RUN}~v000001")
        until(lambda: one.serves(1), all_.hub, one)
        check(one.root / RUN / "v000001")


def test_a_publisher_on_a_following_host_is_refused_and_told_where_to_publish(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        one = all_.follower("one")
        all_.publish(1)
        until(lambda: one.serves(1), one)
        with pytest.raises(ConflictError, match=f"this service follows {all_.hub.refitd.url}"):
            one.client.announce(Notice(run=RUN, step=2))
        with pytest.raises(RunBusyError):
            WeightPublisher(one.root, RUN)
        with (
            WeightPublisher(one.root, "mine", one.refitd.url) as publisher,
            pytest.raises(ConflictError, match=f"this service follows {all_.hub.refitd.url}: publish there"),
        ):
            publisher.publish(tensors(1), step=1)
        assert versions(one.root / "mine") == [], "nothing is written that no engine would be brought to"


def test_a_follower_that_is_killed_in_the_middle_of_a_pull_pulls_the_version_after_its_next_start(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_, Proxy(all_.hub.refitd.port) as proxy:
        hold = Hold()
        name = "model-00001-of-00001.safetensors"
        proxy.plan(f"/v1/versions/{RUN}~v000001/files/{name}", hold)
        one = all_.follower("one", url=f"http://127.0.0.1:{proxy.port}")
        all_.publish(1)
        hold.until_arrived()
        one.refitd.kill()
        hold.release()
        assert versions(one.root / RUN) == []
        one.refitd.start()
        until(lambda: one.serves(1), one)
        check(one.root / RUN / "v000001")


@pytest.mark.parametrize("fault", [Fault.CUT_REQUEST, Fault.HALF_REPLY, Fault.GARBAGE])
def test_a_link_that_fails_in_the_middle_of_a_part_costs_that_part_alone(fault: Fault, tmp_path: Path) -> None:
    with hosts(tmp_path) as all_, Proxy(all_.hub.refitd.port) as proxy:
        proxy.plan(f"/v1/versions/{RUN}~v000001/files/model-00001-of-00001.safetensors", fault)
        one = all_.follower("one", url=f"http://127.0.0.1:{proxy.port}")
        all_.publish(1)
        until(lambda: one.serves(1), one)
        check(one.root / RUN / "v000001")


def test_what_a_follower_pulls_is_kept_at_the_hub_while_it_says_so(tmp_path: Path) -> None:
    with hosts(tmp_path, "--keep-last", "1", "--slots", "0") as all_:
        hub = all_.hub
        first = all_.publish(1)
        until(lambda: hub.client.version(first).state is VersionState.SEALED, hub)
        all_.report("slow", first)
        for step in (2, 3):
            newest = all_.publish(step)
            until(lambda newest=newest: hub.client.version(newest).state is VersionState.SEALED, hub)
        kept = next(line for line in hub.client.reclaim().items if line.version == first)
        assert kept.keep
        assert "follower slow pulls it" in kept.reasons
        all_.report("slow")
        hub.client.reclaim()
        assert not (hub.root / RUN / "v000001").exists()
