"""A follower that is killed in the middle of a pull goes on with what has arrived: it loses what was under way."""

import re
from pathlib import Path

import numpy as np

from refitd_client.contract.manifest import BLOCK
from support.checkpoints import Tensors, write_model
from support.hosts import RUN, Host, hosts, until
from support.proxy import Hold, Proxy
from support.published import check_by_blocks, leftovers, versions

PARTS = 7
UNDER_WAY = 4
FILE = f"/v1/versions/{RUN}~v000001/files/model-00001-of-00001.safetensors"


def large() -> Tensors:
    """Weights whose file has seven blocks."""
    values = np.random.default_rng(1).standard_normal((PARTS - 1) * BLOCK // 4 + 1000, np.float32)
    return {"layer.0.weight": values.reshape(1, -1)}


def pulled(host: Host) -> tuple[int, int]:
    """How many bytes the last pull took from the upstream, and how many were there."""
    texts = [entry["text"] for entry in host.get("/v1/log").json()["items"]]
    found = [re.match(r"pulled (\d+) bytes in .*?(?:; (\d+) bytes were here)?$", text) for text in texts]
    (last,) = [match for match in found if match]
    return int(last[1]), int(last[2] or 0)


def test_a_follower_killed_in_the_middle_of_a_pull_pulls_what_had_not_arrived_and_no_more(tmp_path: Path) -> None:
    weights = large()
    base = str(write_model(tmp_path / "larger", weights))
    with hosts(tmp_path, "--base-model", base) as all_, Proxy(all_.hub.refitd.port) as proxy:
        holds = [Hold() for _ in range(PARTS)]
        proxy.plan(FILE, *holds)
        one = all_.follower("one", "--base-model", base, url=proxy.url)
        all_.publish(1, weights)
        for hold in holds[: PARTS - UNDER_WAY]:
            hold.until_arrived()
            hold.release()
        came = (PARTS - UNDER_WAY) * BLOCK
        until(lambda: one.following()["pulled_bytes"] >= came, one)
        one.refitd.kill()
        for hold in holds:
            hold.release()
        assert versions(one.root / RUN) == []
        one.refitd.start()
        until(lambda: one.serves(1), one)
        new, kept = pulled(one)
        assert kept >= came
        assert new + kept == sum(file.size for file in check_by_blocks(one.root / RUN / "v000001").files.values())
        assert leftovers(one.root / RUN) == []


def test_what_was_pulled_of_a_version_goes_when_the_run_went_on_meanwhile(tmp_path: Path) -> None:
    weights = large()
    base = str(write_model(tmp_path / "larger", weights))
    with hosts(tmp_path, "--base-model", base) as all_, Proxy(all_.hub.refitd.port) as proxy:
        holds = [Hold() for _ in range(PARTS)]
        proxy.plan(FILE, *holds)
        one = all_.follower("one", "--base-model", base, url=proxy.url)
        all_.publish(1, weights)
        holds[0].until_arrived()
        holds[0].release()
        until(lambda: one.following()["pulled_bytes"] >= BLOCK, one)
        one.refitd.kill()
        for hold in holds:
            hold.release()
        assert leftovers(one.root / RUN) != []
        newer = all_.publish(2, {name: tensor + 1 for name, tensor in weights.items()})
        until(lambda: all_.hub.client.overview().runs[0].target == newer, all_.hub)
        one.refitd.start()
        until(lambda: one.serves(2) and leftovers(one.root / RUN) == [], one)
        assert not (one.root / RUN / "v000001").exists()
