"""A module of transformers is published by the names, and in the form, of its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import core_model_loading

from refitd_client import InvalidWeightsError, PublishOptions, WeightPublisher
from refitd_client.sharded.holdings import NamingOptions, holdings_of
from refitd_client.tensors import Casts
from refitd_client.write.plan import ModuleState, checkpoint_names
from support import published
from support.renamed_models import llava, mixtral


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for shard in published.shards(folder) for name, each in load_file(shard).items()}


@pytest.mark.parametrize("make", [llava, mixtral])
@pytest.mark.parametrize("way", ["committed", "staged", "delta"])
def test_a_module_is_published_as_save_pretrained_writes_it(tmp_path: Path, make: Any, way: str) -> None:
    model = make()
    model.save_pretrained(tmp_path / "saved")
    saved = _tensors(tmp_path / "saved")
    assert saved.keys() != model.state_dict().keys()
    with WeightPublisher(tmp_path, "run", options=PublishOptions(base_model=tmp_path / "saved")) as publisher:
        if way == "staged":
            folder = publisher.publish(model, step=1, block="staged").committed().path
        else:
            folder = publisher.publish(model, step=1, transport="delta" if way == "delta" else None).path
    got = _tensors(folder)
    assert got.keys() == saved.keys()
    assert all(torch.equal(got[name], saved[name]) for name in saved)


def test_wrapped_modules_have_the_names_of_their_checkpoint_and_the_caller_renames_those(tmp_path: Path) -> None:
    class Ddp(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    with WeightPublisher(tmp_path, "run", options=PublishOptions(rename=lambda name: f"mine.{name}")) as publisher:
        folder = publisher.publish(Ddp(llava()), step=1).path
    names = _tensors(folder).keys()
    assert "mine.language_model.model.layers.0.self_attn.q_proj.weight" in names


def test_a_rename_copies_no_tensor() -> None:
    model = llava()
    state = model.state_dict()
    names = checkpoint_names(model, state)
    assert names is not None
    assert names["model.language_model.norm.weight"] == "language_model.model.norm.weight"
    assert names.keys() == state.keys()


def test_a_state_dict_that_the_trainer_has_gathered_is_reverted_as_its_module_is(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "saved")
    with WeightPublisher(tmp_path, "run") as publisher:
        folder = publisher.publish(ModuleState(model, model.state_dict()), step=1).path
    assert _tensors(folder).keys() == _tensors(tmp_path / "saved").keys()


def test_what_is_reverted_is_found_once_of_an_unchanged_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revert, reverted = core_model_loading.revert_weight_conversion, []
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda *of: reverted.append(of) or revert(*of))
    model = llava()
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(model, step=1)
        publisher.publish(model, step=2)
        assert len(reverted) == 1
        model.register_buffer("more", torch.ones(2))
        assert "more" in _tensors(publisher.publish(model, step=3).path)
    assert len(reverted) == 2


def test_a_module_whose_names_the_base_model_has_keeps_them(tmp_path: Path) -> None:
    model = llava()
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    with WeightPublisher(tmp_path, "run", options=PublishOptions(base_model=tmp_path / "saved")) as publisher:
        folder = publisher.publish(model, step=1).path
    assert _tensors(folder).keys() == model.state_dict().keys()


def test_what_transformers_cannot_convert_back_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no way back")

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", refuse)
    with (
        WeightPublisher(tmp_path, "run") as publisher,
        pytest.raises(InvalidWeightsError, match=r"LlavaFor.*no way back.*save_pretrained") as refused,
    ):
        publisher.publish(llava(), step=1)
    assert len(str(refused.value)) <= 240


def test_ranks_rename_and_refuse_to_convert() -> None:
    options = NamingOptions(casts=Casts(), rename=None)
    assert "language_model.model.norm.weight" in holdings_of(llava(), options, {})
    with pytest.raises(InvalidWeightsError, match="ranks cannot convert") as refused:
        holdings_of(mixtral(), options, {})
    assert len(str(refused.value)) <= 240
