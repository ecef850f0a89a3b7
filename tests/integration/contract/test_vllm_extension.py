"""refitd's extension in a real vLLM on the CPU: what each update leaves behind, on one rank and on two."""

import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from refitd.engine.port import EnginePort, Outcome, Reached, Stage, Target
from refitd_client.contract.plugin import NEEDS_FULL, UpdateOutcome
from support.forged import files_of, forge, version_of, write_delta
from support.servers import VLLM_VENV
from support.subject import ignore_stage
from support.vllm import OneVllm, PluggedVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

BAD = ["bad_empty", "bad_extra", "bad_garbage", "bad_missing", "bad_nan", "bad_shape", "bad_shape_norm"]
BAD += ["bad_shard2_gone", "bad_shard2_trunc", "bad_trunc", "b_only_lm_head", "b_fp32"]
# On one rank linear layers are repacked, and on two they are not; the other two ways round take two servers more.
KINDS = ["vllm-plugged", "vllm-plugged-two-ranks"]
MORE = ["vllm-plugged-in-place", "vllm-plugged-two-ranks-repacked"]


@pytest.fixture(scope="session", params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def subject(kind: str, one_vllm: OneVllm) -> VllmSubject:
    return one_vllm.subject(kind)


@pytest.fixture
def server(subject: VllmSubject) -> PluggedVllm:
    assert isinstance(subject.server, PluggedVllm)
    return subject.server


def outcomes(answers: list[Any]) -> set[UpdateOutcome]:
    return {answer.outcome for answer in answers}


def ranks(server: PluggedVllm) -> int:
    return len(server.call("refitd_open"))


async def test_an_update_serves_the_version_on_every_rank_and_back(
    subject: VllmSubject, server: PluggedVllm, vllm_models: Path
) -> None:
    assert outcomes(server.update(version_of(server.root, vllm_models / "model_a"))) == {UpdateOutcome.SERVED}
    answer = await subject.answer()
    b = server.update(version_of(server.root, vllm_models / "model_b"))
    assert outcomes(b) == {UpdateOutcome.SERVED}, b
    assert len(b) == ranks(server)
    assert all(each.contents for each in b)
    other = await subject.answer()
    assert other != answer
    again = server.update(version_of(server.root, vllm_models / "b_sharded"))
    assert outcomes(again) == {UpdateOutcome.SERVED}, again
    assert [each.contents for each in again] == [each.contents for each in b]
    assert await subject.answer() == other
    back = server.update(version_of(server.root, vllm_models / "model_a"))
    assert outcomes(back) == {UpdateOutcome.SERVED}, back
    assert await subject.answer() == answer


@pytest.mark.parametrize("model", BAD)
async def test_a_bad_checkpoint_is_refused_before_a_byte_is_written(
    subject: VllmSubject, server: PluggedVllm, vllm_models: Path, model: str
) -> None:
    assert outcomes(server.update(version_of(server.root, vllm_models / "model_a"))) == {UpdateOutcome.SERVED}
    answer = await subject.answer()
    refused = server.update(version_of(server.root, vllm_models / model))
    assert outcomes(refused) == {UpdateOutcome.REFUSED}, refused
    assert await subject.answer() == answer
    assert outcomes(server.update(version_of(server.root, vllm_models / "model_b"))) == {UpdateOutcome.SERVED}
    assert await subject.answer() != answer


async def test_a_delta_is_written_in_place_where_loads_are_copies_and_asks_for_a_full_version_elsewhere(
    subject: VllmSubject, server: PluggedVllm, vllm_models: Path, kind: str
) -> None:
    run = "delta/whole"
    before = load_file(vllm_models / "model_a/model.safetensors")
    after = {name: weight.clone() for name, weight in before.items()}
    after["model.layers.1.mlp.up_proj.weight"][::3] *= -2
    after["lm_head.weight"][5:90] *= 3
    full = forge(server.root, run, 1, vllm_models / "model_a")
    folder = server.root / run / "v000002"
    write_delta(folder, run, 2, 1, before, after)
    for _ in range(2):  # the second is a replay where there is a plan
        assert outcomes(server.update(full)) == {UpdateOutcome.SERVED}
    answer = await subject.answer()
    found = server.update(folder)
    if kind not in {"vllm-plugged-two-ranks", "vllm-plugged-in-place"}:
        assert outcomes(found) == {UpdateOutcome.REFUSED}, found
        assert {each.needs for each in found} == {NEEDS_FULL}
        assert await subject.answer() == answer
        return
    assert {(each.outcome, each.how) for each in found} == {(UpdateOutcome.SERVED, "delta")}, found
    assert await subject.answer() != answer
    shutil.copytree(vllm_models / "model_a", server.root / "whole")
    save_file(after, server.root / "whole/model.safetensors", metadata={"format": "pt"})
    whole = server.update(forge(server.root, run, 3, server.root / "whole"))
    assert [each.contents for each in whole] == [each.contents for each in found]


@pytest.mark.parametrize("after", [0, 5, 12])
async def test_a_load_that_fails_in_its_midst_is_undone_on_every_rank(
    subject: VllmSubject, server: PluggedVllm, vllm_models: Path, after: int
) -> None:
    assert outcomes(server.update(version_of(server.root, vllm_models / "model_a"))) == {UpdateOutcome.SERVED}
    answer = await subject.answer()
    server.fail(after, rank=ranks(server) - 1)
    failed = server.update(version_of(server.root, vllm_models / "b_only_weights"))
    assert outcomes(failed) <= {UpdateOutcome.RESTORED, UpdateOutcome.REFUSED}, failed
    assert await subject.answer() == answer
    served = server.update(version_of(server.root, vllm_models / "model_b"))
    assert outcomes(served) == {UpdateOutcome.SERVED}, served
    assert await subject.answer() != answer


@asynccontextmanager
async def adapter(subject: VllmSubject) -> AsyncIterator[EnginePort]:
    async with aclosing(subject.adapter()) as engine:
        seen = await engine.probe()
        assert isinstance(seen, Reached)
        assert (seen.plugin, seen.stock_reason) == ("0.1.0", None)
        assert seen.configuration.endswith(" refitd")
        yield engine


def target(server: PluggedVllm, folder: Path, label: str, **known: Any) -> Target:
    return Target(path=str(folder), label=label, files=files_of(server.root, folder), **known)


async def test_the_adapter_prepares_while_the_engine_serves_and_believes_the_answers_of_its_ranks(
    subject: VllmSubject, server: PluggedVllm, vllm_models: Path
) -> None:
    async with adapter(subject) as engine:
        a = await engine.refit(target(server, version_of(server.root, vllm_models / "model_a"), "1"), ignore_stage)
        answer = await subject.answer()
        stages: list[Stage] = []
        b = await engine.refit(target(server, version_of(server.root, vllm_models / "model_b"), "2"), stages.append)
        assert (a.outcome, b.outcome, b.resumed) == (Outcome.ACK, Outcome.ACK, True), (a.reason, b.reason)
        assert stages == [Stage.PREPARE, Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME]
        assert b.fingerprint is not None
        assert b.fingerprint.startswith("plugin:")
        assert await engine.fingerprint() == b.fingerprint
        assert (await subject.answer() != answer, (await subject.named())[1]) == (True, "2")
        assert await engine.trial("2") is None
