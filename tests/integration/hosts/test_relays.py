"""Followers pull from each other: the hub sends few copies, and no relay is believed or waited for in vain."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from refitd_client.contract.follow import FOLLOWER_HEADER
from refitd_client.contract.manifest import BLOCK
from support.checkpoints import Tensors
from support.hosts import RUN, Host, Hosts, hosts, until
from support.proxy import Hold, Proxy

FILE = "model-00001-of-00001.safetensors"
V1 = f"{RUN}~v000001"


def blocks(count: float, seed: int = 0) -> Tensors:
    """A model of one tensor that takes so many blocks of a file."""
    random = np.random.default_rng(seed)
    return {"layer.weight": random.standard_normal((int(count * BLOCK) // 4,), np.float32)}


def known(all_: Hosts, count: int) -> None:
    """Wait until the hub knows so many followers."""
    until(lambda: len(all_.hub.get("/v1/followers").json()["items"]) == count, all_.hub)


def relays(all_: Hosts) -> dict[str, dict[str, Any]]:
    """The followers' places, by name."""
    return {each["follower"]: each for each in all_.hub.get("/v1/relays").json()["followers"]}


def copies(all_: Hosts, version: str) -> float:
    """How many copies of a version the hub has sent itself."""
    sent = all_.hub.get("/v1/relays").json()["handed_out"]
    return next(each["copies"] for each in sent if each["version"] == version)


def contents(host: Host, step: int) -> dict[str, bytes]:
    """The files of a step, manifest included."""
    return {path.name: path.read_bytes() for path in (host.root / RUN / f"v{step:06d}").iterdir()}


def served(all_: Hosts, step: int, followers: Sequence[Host]) -> None:
    """Wait until all serve a step, and hold what they have against what the hub has."""
    until(lambda: all(host.serves(step) for host in followers), all_.hub, *followers)
    for host in followers:
        assert contents(host, step) == contents(all_.hub, step)


def test_four_followers_are_served_and_the_hub_sends_about_one_copy(tmp_path: Path) -> None:
    with hosts(tmp_path, weights=blocks(3.5)) as all_:
        followers = [all_.relay(f"f{number}", "--follower", f"f{number}", "--zone", "z") for number in range(4)]
        known(all_, 4)
        all_.publish(1, blocks(3.5, 1))
        served(all_, 1, followers)
        second = all_.publish(2, blocks(3.5, 2))
        served(all_, 2, followers)
        assert copies(all_, second) <= 2
        parents = [parent for place in relays(all_).values() for parent in place["parents"]]
        assert parents.count(None) == 2
        assert all(parents.count(f"f{number}") <= 2 for number in range(4))
        metrics = all_.hub.get("/metrics").text
        sent = next(line for line in metrics.splitlines() if line.startswith("refitd_handed_out_bytes_total"))
        assert float(sent.split()[1]) <= 2 * 2 * 3.6 * BLOCK
        related = next(name for name, place in relays(all_).items() if None not in place["parents"])
        while copies(all_, second) < 2:
            _given(all_, second, None)
        assert _given(all_, second, related) == 503
        assert _given(all_, second, "somebody else") == 206


def _given(all_: Hosts, version: str, follower: str | None) -> int:
    """The status of the hub's answer to a follower that asks it for most of the first block."""
    headers = {"Range": f"bytes=0-{BLOCK - 2}"} | ({} if follower is None else {FOLLOWER_HEADER: follower})
    return all_.hub.get(f"/v1/versions/{version}/files/{FILE}", headers=headers).status_code


def test_a_relay_with_wrong_bytes_is_named_and_not_used_again_until_it_was_restarted(tmp_path: Path) -> None:
    with hosts(tmp_path, weights=blocks(2.5)) as all_:
        liar = all_.relay("liar", "--follower", "liar")
        all_.publish(1, blocks(2.5, 1))
        served(all_, 1, [liar])
        damage(liar.root / RUN / "v000001" / FILE)
        other = all_.relay("other", "--follower", "other")
        served(all_, 1, [other])
        until(lambda: all_.hub.client.faults().relays is not None, all_.hub, other)
        wrong = f"bytes {BLOCK // 2} to {BLOCK // 2 + 2**20 - 1} of {FILE} of {V1}"  # they go in blocks of 1 MiB
        said = f"follower liar at {liar.refitd.url} gave follower other wrong bytes: {wrong}"
        assert all_.hub.client.faults().relays == said
        assert said in (entry.text for entry in all_.hub.client.log().items)
        assert relays(all_)["liar"]["why_not"] == said
        assert "liar" not in relays(all_)["other"]["parents"]
        all_.publish(2, blocks(2.5, 2))
        served(all_, 2, [other])
        assert liar.refitd.url not in _pulled(other, 2)
        liar.refitd.restart()
        until(lambda: all_.hub.client.faults().relays is None, all_.hub, liar)
        assert relays(all_)["liar"]["why_not"] is None


def damage(path: Path) -> None:
    """Change bytes in the first block as a failing disk does: nothing but their values tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(BLOCK // 2)
        file.write(b"damage")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _pulled(host: Host, step: int) -> str:
    """What a host said of the pull of a step."""
    texts = [entry.text for entry in host.client.log().items if entry.subject == f"{RUN}~v{step:06d}"]
    return next(text for text in texts if text.startswith("pulled "))


def test_a_relay_that_is_killed_while_it_pulls_itself_costs_its_children_no_byte(tmp_path: Path) -> None:
    with ExitStack() as closing:
        all_ = closing.enter_context(hosts(tmp_path, weights=blocks(3.5)))
        proxy = closing.enter_context(Proxy(all_.hub.refitd.port))
        first = all_.relay("first", "--follower", "first", url=f"http://127.0.0.1:{proxy.port}")
        known(all_, 1)  # so that it has the first place
        others = [all_.relay(f"f{number}", "--follower", f"f{number}") for number in range(3)]
        known(all_, 4)
        held = [Hold() for _ in range(4)]
        proxy.plan(f"/v1/versions/{V1}/files/{FILE}", *held)
        all_.publish(1, blocks(3.5, 1))
        held[0].until_arrived()
        until(lambda: all(host.following()["pulling"] == V1 for host in others), *others)
        children = [name for name, place in relays(all_).items() if "first" in place["parents"]]
        assert len(children) >= 1
        first.refitd.kill()
        served(all_, 1, others)
        first.refitd.start()
        for hold in held:
            hold.release()
        served(all_, 1, [first])
