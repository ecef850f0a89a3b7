"""Links between hosts fail in every way, in the middle of parts: what arrives is right or does not count."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import Tensors, write_model
from support.hosts import RUN, hosts, until
from support.links import Link, Passing, cut, damaged, reordered, slow
from support.published import check_by_blocks, leftovers

MIB = 2**20


def weights(seed: int, size: int) -> Tensors:
    """Weights of so many bytes."""
    values = np.random.default_rng(seed).standard_normal(size // 4, np.float32)
    return {"layer.0.weight": values.reshape(1, -1)}


@pytest.mark.parametrize("fault", [damaged, reordered, cut])
def test_a_link_that_damages_exchanges_or_cuts_in_the_middle_of_a_part_costs_a_file_at_most_and_no_version(
    fault: Callable[[int], Passing], tmp_path: Path
) -> None:
    large = weights(1, 40 * MIB)
    base = str(write_model(tmp_path / "larger", large))
    with hosts(tmp_path, "--base-model", base) as all_, Link(all_.hub.refitd.port) as link:
        link.passing = fault(10 * MIB)
        one = all_.follower("one", "--base-model", base, url=link.url)
        all_.publish(1, large)
        until(lambda: one.serves(1), all_.hub, one)
        check_by_blocks(one.root / RUN / "v000001")
        assert 40 * MIB < link.down < 81 * MIB  # nothing came three times


def test_a_slow_link_brings_the_version_late_and_the_host_is_heard_meanwhile(tmp_path: Path) -> None:
    large = weights(1, 8 * MIB)
    base = str(write_model(tmp_path / "larger", large))
    with hosts(tmp_path, "--base-model", base) as all_, Link(all_.hub.refitd.port) as link:
        one = all_.follower("one", "--base-model", base, url=link.url)
        link.passing = slow(4 * MIB)
        version = all_.publish(1, large)
        until(lambda: one.following()["pulling"] == version, all_.hub, one)
        until(
            lambda: [version] in [each["pulls"] for each in all_.hub.get("/v1/hosts").json()["items"]],
            all_.hub,
            one,
        )
        assert one.client.ready()
        until(lambda: one.serves(1), all_.hub, one)
        assert one.following()["fault"] is None


def test_a_partition_that_heals_leaves_the_newest_version_on_each_side_and_takes_none_back(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_, Link(all_.hub.refitd.port) as link:
        one, near = all_.follower("one", url=link.url), all_.follower("near")
        all_.publish(1)
        until(lambda: one.serves(1) and near.serves(1), all_.hub, one, near)
        link.away()
        for step in (2, 3):
            all_.publish(step)
            until(lambda step=step: near.serves(step), all_.hub, near)
        assert one.serves(1)
        link.back()
        until(lambda: one.serves(3), all_.hub, one)
        loaded = [each["weight_version"] for each in one.engines[0].bodies("/update_weights_from_disk")]
        assert loaded == sorted(loaded)
        assert leftovers(one.root / RUN) == []
