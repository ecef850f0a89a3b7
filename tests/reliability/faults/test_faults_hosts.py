"""Hosts that follow, on full disks, with clocks that are wrong, and with a root that somebody else has written to."""

from pathlib import Path

import numpy as np

from faults.room import fill, room
from refitd_client.contract.states import VersionState
from support.checkpoints import Tensors, write_model
from support.hosts import RUN, hosts, until
from support.links import Link, Stalled
from support.published import check, check_by_blocks, leftovers, versions

MIB = 2**20


def weights(seed: int) -> Tensors:
    """Weights of 4 MiB."""
    return {"layer.0.weight": np.random.default_rng(seed).standard_normal((1, MIB), np.float32)}


def test_enospc_a_full_disk_at_a_follower_is_said_loses_nothing_and_is_over_when_there_is_room(tmp_path: Path) -> None:
    base = str(write_model(tmp_path / "larger", weights(0)))
    flags = ("--base-model", base)
    with hosts(tmp_path, *flags) as all_, room() as where, Link(all_.hub.refitd.port) as link:
        root = where.tmpfs(_made(tmp_path / "one" / "root"), "size=24m")
        seen = where.seen(root)
        one = all_.follower("one", *flags, url=link.url, first=where.enter)
        all_.publish(1, weights(1))
        until(lambda: one.serves(1), all_.hub, one)
        filler = fill(seen, leave=MIB)
        all_.publish(2, weights(2))
        until(lambda: "bytes free" in (one.following()["fault"] or ""), all_.hub, one)
        assert versions(seen / RUN) == ["v000001"]
        assert one.serves(1)
        assert one.client.ready()
        filler.unlink()
        until(lambda: one.serves(2) and one.following()["fault"] is None, all_.hub, one)
        stall = link.passing = Stalled(MIB)  # and now in the middle of a pull
        all_.publish(3, weights(3))
        assert stall.happened.wait(60)
        filler = fill(seen)
        stall.go_on()
        until(lambda: "run~v000003 was not pulled" in (one.following()["fault"] or ""), all_.hub, one)
        assert one.serves(2)
        filler.unlink()
        until(lambda: one.serves(3) and one.following()["fault"] is None, all_.hub, one)
        check_by_blocks(seen / RUN / "v000003")
        assert leftovers(seen / RUN) == []


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_what_somebody_else_has_put_at_a_versions_place_is_left_alone_and_said(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        mine = _made(tmp_path / "one" / "root" / RUN / "v000001")
        (mine / "notes.txt").write_text("not refitd's")
        one = all_.follower("one")
        version = all_.publish(1)
        until(lambda: one.following()["desired"] == version, all_.hub, one)
        until(lambda: one.following()["fault"] is not None, all_.hub, one)
        assert "what lies at run/v000001 on this host is SETTLING" in one.following()["fault"]
        assert one.engines[0].served["model_path"] == "/base"
        all_.publish(2)
        until(lambda: one.serves(2), all_.hub, one)
        assert (mine / "notes.txt").read_text() == "not refitd's"
        assert {path.name for path in mine.iterdir()} == {"notes.txt"}
        check(one.root / RUN / "v000002")
        assert one.client.version(f"{RUN}~v000002").state is VersionState.SEALED
