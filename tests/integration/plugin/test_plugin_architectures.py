"""Load plans of real loaders, on every rank: what a replay or a delta leaves is what a stock load leaves."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import WeightPublisher
from refitd_client.contract.plugin import UpdateOutcome
from support.architectures import ARCHITECTURES, change, make
from support.forged import write_delta
from support.plugged import RELEASE, PluggedSglang
from support.sockets import ask

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "run"
DERIVED = {"gemma2": 9}  # each of its norms is read again in the model, and goes through the loader


def versions(root: Path, *models: Path) -> list[Path]:
    """One version of each model."""
    (root / ".refitd").mkdir(parents=True)
    with WeightPublisher(root, RUN) as publisher:
        for step, model in enumerate(models, start=1):
            publisher.publish(model, step=step)
    return [root / RUN / f"v{step:06d}" for step in range(1, len(models) + 1)]


def stock_states(server: PluggedSglang, *models: Path) -> list[tuple[str, list[int]]]:
    """What stock SGLang serves of each."""
    found: list[tuple[str, list[int]]] = []
    for model in models:
        assert server.load(model)[0]
        found.append((server.checksum, server.generate()))
    return found


def delta(root: Path, step: int, base: int, before: Path, after: Path) -> Path:
    """A version that is what changed from one model's folder to another's."""
    weights = [load_file(each / "model.safetensors") for each in (before, after)]
    folder = root / RUN / f"v{step:06d}"
    write_delta(folder, RUN, step, base, *weights)
    return folder


BY_PLAN = ((0, "load"), (1, "replay"), (0, "replay"), (2, "delta"), (1, "replay"))
BY_LOADER = ((0, "load"), (1, "load"), (0, "load"))
# Its loader computes there from what it finds.
NEVER_REPLAYED = {("gemma2", release) for release in ("0.5.16", "0.5.19", "0.5.22")}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replay_and_a_delta_leave_what_a_stock_load_leaves(architecture: str, models: Path, tmp_path: Path) -> None:
    if (architecture, RELEASE) == ("gemma2", "0.5.12.post1"):
        pytest.skip("its logits are computed by a triton kernel there, also on a CPU")
    pair = [make(tmp_path / f"{seed}", architecture, seed, models / "model_a") for seed in (1, 2)]
    derived = DERIVED.get(architecture, 0)
    third = change(pair[0], tmp_path / "3", 3, but="norm" if derived else "nothing")
    published = versions(tmp_path / "root", *pair)
    published.append(delta(tmp_path / "root", 3, 1, pair[0], third))
    with PluggedSglang(tmp_path, pair[0], root=tmp_path / "root", TORCHDYNAMO_DISABLE="1") as server:
        stock = stock_states(server, *pair, third)
        assert len({checksum for checksum, _ in stock}) == 3
        for number, how in BY_LOADER if (architecture, RELEASE) in NEVER_REPLAYED else BY_PLAN:
            answer = server.update(published[number])
            assert (answer.outcome, answer.how) == (UpdateOutcome.SERVED, how)
            assert (server.checksum, server.generate()) == stock[number]
        plan = ask(server.sockets[0], do="hello")["plan"]
        if (architecture, RELEASE) in NEVER_REPLAYED:
            assert plan["reason"] == "the loader reads weights that it has not loaded"
            assert server.update(published[2]).needs == "full"
            return
    assert (plan["replays"], plan["proven"], plan["loader"]) == (True, True, derived)


@pytest.mark.skipif(
    tuple(int(part) for part in RELEASE.split(".")[:3] if part.isdigit()) < (0, 5, 19),
    reason=f"SGLang {RELEASE} does not copy weights around a load where none are offloaded",
)
@pytest.mark.parametrize(
    ("staged", "steps"),
    [
        ("itself", ((0, "load"), (1, "replay"), (0, "replay"), (2, "delta"))),
        ("back", ((0, "load"), (1, "replay"), (0, "replay"))),
    ],
)
def test_weights_that_sglang_stages_around_a_load_as_on_a_gpu_are_replayed(
    staged: str, steps: tuple[tuple[int, str], ...], models: Path, tmp_path: Path
) -> None:
    """What is moved to other memory and back after the load goes through the loader, and full versions only."""
    pair = [make(tmp_path / f"{seed}", "llama", seed, models / "model_a") for seed in (1, 2)]
    third = change(pair[0], tmp_path / "3", 3)
    published = versions(tmp_path / "root", *pair)
    published.append(delta(tmp_path / "root", 3, 1, pair[0], third))
    with PluggedSglang(tmp_path, pair[0], root=tmp_path / "root", TORCHDYNAMO_DISABLE="1", STAGED=staged) as server:
        stock = stock_states(server, *pair, third)
        for number, how in steps:
            answer = server.update(published[number])
            assert (answer.outcome, answer.how) == (UpdateOutcome.SERVED, how)
            assert (server.checksum, server.generate()) == stock[number]
        plan = ask(server.sockets[0], do="hello")["plan"]
    assert (plan["replays"], plan["proven"], plan["loader"] > 0) == (True, True, staged == "back")
