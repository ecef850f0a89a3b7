"""With `--defects` the embedded engine does to a bad checkpoint what SGLang 0.5.23 was seen to do."""

from pathlib import Path

import pytest
import torch

from refitd_embedded.model import Decoder
from refitd_embedded.weights import CarelessLoader, CheckpointError, EngineDiedError, Interruption, load
from support.embedded_kit import Tensors, checkpoint, random_tensors, write

OLD, NEW = random_tensors(1), random_tensors(2)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    """A model with the weights OLD."""
    return load(write(tmp_path / "start", OLD))


def of(decoder: Decoder, tensors: Tensors) -> set[str]:
    """The names of those parameters that are as in `tensors`."""
    return {name for name, one in decoder.named_parameters() if name in tensors and torch.equal(one, tensors[name])}


def test_the_rollback_loads_the_new_checkpoint_once_more(decoder: Decoder, tmp_path: Path) -> None:
    loader = CarelessLoader(decoder)
    loader.interruption = Interruption(after=3, times=1)
    outcome = loader.open(checkpoint(tmp_path / "next", 2))()
    assert (outcome or "").endswith("Rolling back to original weights.")
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
