"""A refitd follows another: versions come to its own root, are checked there again, and go to its own engines."""

from pathlib import Path

import pytest

from refitd_client import ConflictError, RunBusyError, WeightPublisher
from refitd_client.contract.wire import Notice
from support.checkpoints import tensors
from support.hosts import RUN, hosts, until
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
