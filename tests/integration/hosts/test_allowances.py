"""What a notice allows holds on each host that follows, and on those that follow them."""

from pathlib import Path

from refitd_client import WeightPublisher
from refitd_client.contract.states import VersionState
from support.checkpoints import tensors
from support.hosts import RUN, hosts, until


def test_a_version_that_may_lack_tensors_and_have_more_is_good_on_each_host_and_travels_on(tmp_path: Path) -> None:
    weights = tensors(1)
    weights["another.weight"] = weights.pop("layer.0.weight")
    with hosts(tmp_path) as all_:
        one = all_.follower("one")
        far = all_.follower("far", url=one.refitd.url)
        with WeightPublisher(all_.hub.root, RUN, all_.hub.refitd.url) as publisher:
            version = publisher.publish(weights, step=1, allow_missing=["layer.0.*"], allow_extra=True).version_id
        until(lambda: one.serves(1) and far.serves(1), all_.hub, one, far)
        for host in (one, far):
            known = host.client.version(version)
            assert (known.state, known.allow_missing, known.allow_extra) == (VersionState.SEALED, ["layer.0.*"], True)
            assert known.left_out == ["layer.0.weight"]
