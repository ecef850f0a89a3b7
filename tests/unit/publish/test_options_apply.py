"""Every option of a publisher is applied to what it is given, or refused: none is passed over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn

from refitd_client import InvalidWeightsError, PublishOptions, WeightPublisher
from support import published
from support.adapters import write_adapter

OPTIONS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "rename": {"w.weight": "renamed"},
    "max_shard_bytes": 8,
    "fingerprints": True,
    "check_finite": False,
    "base_model": "base",
}
OF_GPUS: dict[str, Any] = {"shadow": "gpu", "durable": "never"}  # what they do to tensors is seen in tests/gpu
TENSORS, FILES = ("state dict", "module"), ("folder", "adapter")


def _seen(option: str, folder: Path) -> bool:
    """Whether the version shows that the option was applied."""
    shards = published.shards(folder)
    tensors = {name: each for shard in shards for name, each in load_file(shard).items()}
    match option:
        case "dtype":
            return all(each.dtype is torch.bfloat16 for each in tensors.values())
        case "rename":
            return "renamed" in tensors
        case "max_shard_bytes":
            return len(shards) == 2
        case "check_finite":
            return any(bool(each.isnan().any()) for each in tensors.values())
        case "base_model":
            return (folder / "config.json").read_text() == '{"of": "base"}'
        case _:
            return "fingerprints" in (folder / "refit.json").read_text()


def _weights(kind: str, folder: Path, value: float) -> Any:
    state = {"w.weight": torch.ones(2, 2), "v.weight": torch.full((2, 2), value)}
    if kind == "state dict":
        return state
    if kind == "module":
        module = nn.Module()
        module.w, module.v = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        module.load_state_dict(state)
        return module
    model = folder / "model"
    model.mkdir()
    if kind == "folder":
        save_file(state, model / "model.safetensors")
        return model
    names = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ("q_proj", "v_proj")]
    save_file({name: torch.ones(2, 2) for name in names}, model / "model.safetensors")
    return write_adapter(folder / "adapter", model, 1)


def _options(option: str, folder: Path) -> dict[str, Any]:
    if option == "base_model":
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text('{"of": "base"}')
        return {option: folder / "base"}
    return {option: (OPTIONS | OF_GPUS)[option]}


def _publish(way: str, weights: Any, root: Path, options: dict[str, Any]) -> Path:
    with WeightPublisher(root, "run", options=PublishOptions(**options)) as publisher:
        if way == "staged":
            return publisher.publish(weights, step=1, block="staged").committed().path
        return publisher.publish(weights, step=1, transport="delta" if way == "delta" else None).path


@pytest.mark.parametrize("way", ["committed", "staged", "delta"])
@pytest.mark.parametrize("kind", [*TENSORS, *FILES])
@pytest.mark.parametrize("option", [*OPTIONS, *OF_GPUS])
def test_an_option_is_applied_or_refused(tmp_path: Path, option: str, kind: str, way: str) -> None:
    weights = _weights(kind, tmp_path, torch.nan if option == "check_finite" else 1.0)
    options, root = _options(option, tmp_path), tmp_path / "root"
    if kind in TENSORS and option in OF_GPUS:
        assert published.shards(_publish(way, weights, root, options))
    elif kind in TENSORS or (kind, option) == ("folder", "base_model"):
        assert _seen(option, _publish(way, weights, root, options))
    else:
        with pytest.raises(InvalidWeightsError, match=f"{option}= of this publisher would do nothing"):
            _publish(way, weights, root, options)
        assert not list(root.glob("*/v*"))


def test_a_generator_of_tensors_is_no_weights_with_any_option(tmp_path: Path) -> None:
    for option in OPTIONS | OF_GPUS:
        weights = (pair for pair in [("w", torch.ones(1))])
        with pytest.raises(InvalidWeightsError, match="weights are a generator: pass a state dict"):
            _publish("committed", weights, tmp_path / "root", _options(option, tmp_path))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [*TENSORS, "folder"])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_several_ranks_is_applied_or_refused(tmp_path: Path, option: str, kind: str) -> None:
    weights = _weights(kind, tmp_path, torch.nan if option == "check_finite" else 1.0)
    with WeightPublisher(
        tmp_path / "root", "run", ranks="all", options=PublishOptions(**_options(option, tmp_path))
    ) as publisher:
        if kind in TENSORS:
            assert _seen(option, publisher.publish(weights, step=1).path)
        else:
            with pytest.raises(InvalidWeightsError, match="pass the module or this rank's state dict"):
                publisher.publish(weights, step=1)


def test_a_dtype_for_all_leaves_each_tensor_in_the_base_model_s(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    kept = {"bias": torch.ones(2), "w": torch.ones(2, dtype=torch.bfloat16), "named": torch.ones(2)}
    save_file(kept, base / "model.safetensors")
    rules = {"named": torch.float16, "*": torch.bfloat16}
    with WeightPublisher(tmp_path / "root", "run", options=PublishOptions(base_model=base, dtype=rules)) as publisher:
        folder = publisher.publish({name: torch.ones(2) for name in (*kept, "new")}, step=1).path
    (shard,) = published.shards(folder)
    dtypes = {name: each.dtype for name, each in load_file(shard).items()}
    assert dtypes == {"bias": torch.float32, "w": torch.bfloat16, "named": torch.float16, "new": torch.bfloat16}
