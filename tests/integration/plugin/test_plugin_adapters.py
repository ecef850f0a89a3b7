"""LoRA inside an SGLang with the plugin: an update of the base leaves adapters alone, and they leave its plan alone."""

from collections.abc import Generator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import WeightPublisher
from refitd_client.contract.plugin import UpdateOutcome
from support.adapters import FLAGS, write_adapter
from support.architectures import change
from support.forged import write_delta
from support.plugged import PluggedSglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "with/adapters"
A, B, CHANGED = 1, 2, 3
Said = tuple[str, list[int], list[int]]


@pytest.fixture(scope="module")
def bases(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What the versions hold: two models, and the first with some elements changed."""
    changed = change(models / "model_a", tmp_path_factory.mktemp("changed") / "model", 3)
    return {A: models / "model_a", B: models / "model_b", CHANGED: changed}


@pytest.fixture(scope="module")
def adapters(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{seed}", models / "model_a", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def root(bases: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full version of each model, and a delta from the first to what it was changed to."""
    root = tmp_path_factory.mktemp("root")
    (root / ".refitd").mkdir()
    with WeightPublisher(root, RUN) as publisher:
        for step in (A, B):
            publisher.publish(bases[step], step=step)
    weights = [load_file(bases[step] / "model.safetensors") for step in (A, CHANGED)]
    write_delta(version(root, CHANGED), RUN, CHANGED, A, *weights)
    return root


@pytest.fixture(scope="module")
def server(root: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[PluggedSglang]:
    with PluggedSglang(tmp_path_factory.mktemp("plugged"), models / "model_a", *FLAGS, root=root) as server:
        yield server


@pytest.fixture
def adapted(server: PluggedSglang, adapters: list[Path]) -> Generator[PluggedSglang]:
    """With an adapter for the length of a test."""
    server.load_adapter("actor", adapters[0])
    yield server
    server.unload_adapter("actor")


def version(root: Path, step: int) -> Path:
    return root / RUN / f"v{step:06d}"


def said(server: PluggedSglang) -> Said:
    """All weights of the base, what the model answers by them alone, and what it answers with the adapter."""
    return server.checksum, server.generate(), server.generate(adapter="actor")


def stock(server: PluggedSglang, base: Path) -> Said:
    """The same after a load that the plugin has nothing to do with."""
    assert server.load(base)[0]
    return said(server)


def test_an_adapter_answers_on_each_base_as_it_does_after_a_stock_load(
    adapted: PluggedSglang, root: Path, bases: dict[int, Path]
) -> None:
    """By the loader, by replays, by a delta, and by what is put back when a load fails."""
    expected = {step: stock(adapted, base) for step, base in bases.items()}
    answers = [answer for _, *both in expected.values() for answer in both]
    assert all(answers.count(answer) == 1 for answer in answers)
    hows = set()
    for step in (B, A, B, A, CHANGED, B):
        answer = adapted.update(version(root, step), str(step))
        assert answer.outcome is UpdateOutcome.SERVED
        assert said(adapted) == expected[step]
        hows.add((step == CHANGED, answer.how))
    assert hows >= {(False, "replay"), (True, "delta")}
    adapted.fail("copy 5")
    assert adapted.update(version(root, A)).outcome is UpdateOutcome.RESTORED
    assert said(adapted) == expected[B]
