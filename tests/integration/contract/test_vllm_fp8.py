"""Fp8 in blocks in a real vLLM: `dtype="fp8_block"` is served, by vLLM's own reload and with refitd inside.

vLLM's build for the CPU has kernels for it on processors with AMX alone. So the kernel is torch's arithmetic here, on
weights that are turned after each load (see `support.vllm_faults`); all else is vLLM's.
"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd.engine.port import Outcome
from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.plugin import UpdateOutcome
from support.architectures import make
from support.forged import version_of
from support.servers import VLLM_VENV
from support.vllm import OneVllm, PluggedVllm, VllmSubject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]

WIDTH = 512  # stacked projections have to be whole blocks of 128


@pytest.fixture
def models(vllm_models: Path, tmp_path: Path) -> Path:
    """Two models in fp8, as an engine can be started on."""
    trained, made = tmp_path / "trained", tmp_path / "models"
    for seed, name in enumerate(("model_a", "model_b"), start=1):
        make(trained / name, "qwen3", seed, vllm_models / "model_a", WIDTH)
        options = {"base_model": trained / name, "dtype": "fp8_block"}
        with WeightPublisher(tmp_path / "published", name, options=PublishOptions(**options)) as publisher:
            path = publisher.publish(load_file(trained / name / "model.safetensors"), step=1).path
        shutil.copytree(path, made / name, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    return made


async def test_an_updated_engine_answers_as_one_that_was_started_on_those_files(
    one_vllm: OneVllm, models: Path, tmp_path: Path
) -> None:
    """And a load that fails in its midst is put back."""
    one_vllm.stop()  # one at a time: each takes 2 GB
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    started: dict[str, list[int]] = {}
    for name in ("model_b", "model_a"):
        (tmp_path / name).mkdir()
        with PluggedVllm(tmp_path / name, models / name, root=root, FP8="1") as server:
            stock, inside = VllmSubject(server, models), VllmSubject(server, models, "vllm-plugged", root)
            try:
                started[name] = await stock.answer()
                assert len({tuple(each) for each in started.values()}) == len(started)
                for subject in (stock, inside, stock, inside) if name == "model_a" else ():
                    for number, model in enumerate(("model_b", "model_a"), start=2):
                        done = await subject.refit(model, str(number), repairs=True)
                        assert done.outcome is Outcome.ACK, done.reason
                        assert await subject.answer() == started[model]
                if name == "model_a":
                    server.fail(4)
                    broken = server.update(version_of(root, models / "model_b"))
                    assert [each.outcome for each in broken] == [UpdateOutcome.RESTORED], broken
                    assert await inside.answer() == started["model_a"]
            finally:
                await stock.engine.aclose()
                await inside.engine.aclose()
