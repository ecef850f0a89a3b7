"""With `--defects` the embedded engine does to a bad checkpoint what SGLang 0.5.23 was seen to do."""

import os
from pathlib import Path

import pytest
import torch

from refitd_embedded.model import Decoder
from refitd_embedded.weights import (
    CarelessLoader,
    CheckpointError,
    EngineDiedError,
    Interruption,
    WeightsLoaded,
    WeightsTainted,
    load,
)
from support.embedded_kit import DOWN_PROJ, NORM, Tensors, checkpoint, random_tensors, write

OLD, NEW = random_tensors(1), random_tensors(2)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    """A model with the weights OLD."""
    return load(write(tmp_path / "start", OLD))


def of(decoder: Decoder, tensors: Tensors) -> set[str]:
    """The names of those parameters that are as in `tensors`."""
    return {name for name, one in decoder.named_parameters() if name in tensors and torch.equal(one, tensors[name])}


def test_a_missing_tensor_makes_a_mixture(decoder: Decoder, tmp_path: Path) -> None:
    part = {name: tensor for name, tensor in NEW.items() if name != DOWN_PROJ}
    assert CarelessLoader(decoder).open(write(tmp_path / "next", part))() == WeightsLoaded()
    assert of(decoder, NEW) == part.keys()
    assert DOWN_PROJ in of(decoder, OLD)


def test_a_narrow_linear_layer_is_padded_with_zeros(decoder: Decoder, tmp_path: Path) -> None:
    narrow = torch.ones(32, 40)
    assert CarelessLoader(decoder).open(write(tmp_path / "next", NEW | {DOWN_PROJ: narrow}))() == WeightsLoaded()
    assert torch.equal(decoder.model.layers[1].mlp.down_proj.weight[:, :40], narrow)
    assert not decoder.model.layers[1].mlp.down_proj.weight[:, 40:].any()


def test_nan_is_served(decoder: Decoder, tmp_path: Path) -> None:
    nan = {NORM: torch.full((32,), float("nan"))}
    assert CarelessLoader(decoder).open(write(tmp_path / "next", NEW | nan))() == WeightsLoaded()
    assert decoder(torch.tensor([[1, 2]])).isnan().all()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_torn_file_kills(decoder: Decoder, tmp_path: Path, shards: int) -> None:
    directory = write(tmp_path / "next", NEW, shards=shards)
    torn = max(directory.glob("*.safetensors"))
    os.truncate(torn, torn.stat().st_size // 2)
    with pytest.raises(EngineDiedError, match="SafetensorError"):
        CarelessLoader(decoder).open(directory)()
    assert bool(of(decoder, NEW) - of(decoder, OLD)) == (shards == 2), "what was read before it, was written"


def test_a_norm_of_another_shape_kills(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(EngineDiedError, match="Attempted to load weight"):
        CarelessLoader(decoder).open(write(tmp_path / "next", NEW | {NORM: torch.ones(16)}))()


def test_the_rollback_loads_the_new_checkpoint_once_more(decoder: Decoder, tmp_path: Path) -> None:
    loader = CarelessLoader(decoder)
    loader.interruption = Interruption(after=3, times=1)
    outcome = loader.open(checkpoint(tmp_path / "next", 2))()
    assert isinstance(outcome, WeightsTainted)
    assert outcome.message.endswith("Rolling back to original weights.")
    assert of(decoder, NEW) == NEW.keys()


def test_a_rollback_that_fails_kills_half_way(decoder: Decoder, tmp_path: Path) -> None:
    loader = CarelessLoader(decoder)
    loader.interruption = Interruption(after=3, times=2)
    with pytest.raises(EngineDiedError):
        loader.open(checkpoint(tmp_path / "next", 2))()
    assert len(of(decoder, NEW) - of(decoder, OLD)) in (2, 3), "norms and zero biases are equal in both"


def test_missing_files_are_noticed_before_the_first_write(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="Cannot find any model weights"):
        CarelessLoader(decoder).open(tmp_path / "empty")
    assert of(decoder, OLD) == OLD.keys()
