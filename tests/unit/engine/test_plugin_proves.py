"""What the ranks of an engine prove, over their sockets as they are: the service believes it where it is no less than
its own reading would find."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from refitd.engine.port import Coming, Outcome, RankProof, Reached
from refitd.engine.transaction import ServerEngine
from refitd.policy.admit import fault_in
from refitd_client.validation.examine import structure
from support.engines import sglang_engine
from support.plugged_mini import PluggedMini, plugged_mini, put, target

COMING = Coming(version="run~v000001", path="run/v000001", prove=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=[1, 2])
def sglang(root: Path, request: pytest.FixtureRequest) -> Iterator[PluggedMini]:
    with plugged_mini(root, request.param) as engine:
        yield engine


@asynccontextmanager
async def reached(sglang: PluggedMini, root: Path) -> AsyncIterator[ServerEngine]:
    async with aclosing(sglang_engine(sglang.url, root=root)) as engine:
        seen = await engine.probe()
        assert isinstance(seen, Reached)
        assert seen.proves
        yield engine


async def test_ranks_prove_what_they_prepare_and_the_load_takes_it(root: Path, sglang: PluggedMini) -> None:
    put(root, 1, fingerprints=True)
    async with reached(sglang, root) as engine:
        found = await engine.prefetch(COMING)
        assert fault_in(structure(root, COMING.path), found) is None
        assert {proof.ranks for proof in found} == {len(sglang.members)}
        assert not sglang.changes  # nothing was paused, and nothing was written
        done = await engine.refit(target(root, 1), lambda _: None)
    assert (done.outcome, sglang.holds(1)) == (Outcome.ACK, True)


async def test_what_ranks_find_damaged_is_no_proof(root: Path, sglang: PluggedMini) -> None:
    folder = put(root, 1, fingerprints=True)
    shard = folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    async with reached(sglang, root) as engine:
        found = await engine.prefetch(COMING)
    assert "has another fingerprint" in (fault_in(structure(root, COMING.path), found) or "")


async def test_ranks_that_are_not_asked_to_prove_read_no_tensor(root: Path, sglang: PluggedMini) -> None:
    put(root, 1, fingerprints=True)
    async with reached(sglang, root) as engine:
        assert await engine.prefetch(Coming(version="run~v000001", path="run/v000001")) == ()


async def test_a_rank_that_refuses_or_is_gone_proves_nothing(root: Path, sglang: PluggedMini) -> None:
    async with reached(sglang, root) as engine:
        found = await engine.prefetch(COMING)  # there is no such version
    assert all(isinstance(proof, RankProof) and proof.fault for proof in found)
