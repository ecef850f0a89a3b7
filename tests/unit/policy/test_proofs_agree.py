"""Loads that go on at the same moment find nothing on record: what they have left behind is compared afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refitd.engine.fingerprints import agree, comparable, proof_by, what_was_compared
from refitd.engine.port import Outcome, Reached, Refit
from refitd.policy.observe import Expected, after_probe, after_refit, compared, proved
from refitd.state.records import AttemptRecord
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.states import EngineState
from refitd_hosts.hub.engine import doubt
from support.checkpoints import publish, tensors
from support.records import engine, version
from support.services import Stage, serving

V1 = version(1).id


@pytest.mark.parametrize(
    ("found", "recorded", "same"),
    [
        ("xxh3:1", "xxh3:1", True),
        ("xxh3:1", "xxh3:2", False),
        ("plugin:xxh3:1+plugin:xxh3:2", "plugin:xxh3:1+plugin:xxh3:3", False),
        ("host:a:1", "host:a:2", False),
        ("host:a:1", "host:b:1", None),
        ("vllm:xxh3:1", "xxh3:1", None),
        ("plugin:xxh3:1", "plugin:xxh3:1+plugin:xxh3:1", None),
        ("vllm-answers:-:-1.000", "vllm-answers:-:-1.000", None),
    ],
)
def test_fingerprints_by_the_same_means_are_compared_and_answers_to_a_prompt_are_not(
    found: str, recorded: str, same: bool | None
) -> None:
    assert agree(found, recorded) is same


def test_a_host_s_proof_is_compared_with_that_of_a_host_of_the_same_makings_alone() -> None:
    assert (comparable("host:a:1", "host:a:2"), comparable("host:a:1", "host:b:2")) == (True, False)
    assert doubt("host:a:1", "host:a:2", None) is not None
    assert doubt("host:a:1", "host:b:2", None) is None
    found_later = engine(pulls=True, serving=V1, configuration="c")
    after = compared(found_later, "host:b:1", "host:a:1", V1)
    assert (after.serving, after.state) == (V1, EngineState.IN_SYNC), "it is not loaded once more for nothing"
    assert what_was_compared(after.contents.proof) == (
        "What is on record of the version was computed by other means: they were compared with nothing."
    )
    assert compared(found_later, "host:a:2", "host:a:1", V1).serving is None
    assert compared(found_later.having(host=None), "xxh3:2", "plugin:xxh3:1", V1).serving is None


def test_a_load_that_was_compared_with_nothing_does_not_say_that_it_was() -> None:
    loaded = after_refit(engine(), V1, Refit(outcome=Outcome.ACK, resumed=True, fingerprint="vllm:xxh3:1"), 0.0)
    assert proved(loaded, "vllm:xxh3:1", None).contents.proof == "digests of parameters (recorded, not yet compared)"
    assert proved(loaded, "vllm:xxh3:1", "vllm:xxh3:1").contents.proof == "digests of parameters"
    of_others = proved(loaded, "vllm:xxh3:1", "vllm-answers:-:-1.000").contents.proof
    assert of_others == "digests of parameters (not compared: what is on record is of other means)"
    assert proved(loaded, "plugin:xxh3:1", "xxh3:1").contents.proof == "fingerprints of refitd's plugin"


def test_what_proved_a_host_s_last_version_says_nothing_of_the_one_that_it_was_found_to_serve() -> None:
    order = AttemptRecord(id="1", engine="a", version=V1, started_at="", outcome="UNREACHABLE")
    before = engine(pulls=True, serving=None, last_attempt=order, proof=proof_by("host:a:1", recorded=True))
    seen: dict[str, Any] = {
        "model_path": "/root/run/v000001",
        "weight_version": "1",
        "serves": V1,
        "host": HostEngines(follower="a"),
    }
    reached = Reached(server_version="1", configuration="c", startup_path=None, **seen)
    found = after_probe(before, reached, Expected(path="", label=""), V1, 0.0)
    assert (found.serving, found.contents.proof) == (V1, None)
    assert compared(found, "host:a:1", "host:a:1", V1).contents.proof == proof_by("host:a:1")


async def at_one_moment(stage: Stage) -> None:
    """Publish a version that both engines load before either has ended."""
    gate = asyncio.Event()
    for simulated in stage.engines.values():
        simulated.gate, simulated.proof = gate, simulated.proof or "xxh3:"
    publish(stage.root, "run", 1, tensors(1))
    await stage.until(V1, lambda _: all(simulated.loads for simulated in stage.engines.values()))
    gate.set()


def proofs(stage: Stage) -> list[tuple[str | None, str | None]]:
    return [(each.serving, each.contents.proof) for each in stage.store.engines.values()]


async def test_two_engines_that_load_a_version_at_one_moment_prove_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await at_one_moment(stage)
        await stage.until(V1, lambda _: proofs(stage) == [(V1, "checksums of tensors")] * 2)
        assert [len(each.loads) for each in stage.engines.values()] == [1, 1]


async def test_answers_to_a_prompt_that_came_at_one_moment_prove_nothing_of_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        for simulated in stage.engines.values():
            simulated.proof = "vllm-answers:"
        await at_one_moment(stage)
        first = "answers to a fixed prompt (recorded, not yet compared)"
        await stage.until(V1, lambda _: proofs(stage) == [(V1, first)] * 2)
