"""The callback and a model that peft wraps: what cannot be saved ends no training, and nobody asks the hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import SafetensorError

from refitd_client import StorageError
from support.published import versions

if TYPE_CHECKING:
    from refitd_client.trainers.transformers import RefitCallback


class Wrapped(torch.nn.Linear):
    """As peft's model looks to the callback."""

    peft_config = "any"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(2, 2)
        self.error = error
        self.asked: dict[str, Any] = {}

    def save_pretrained(self, folder: str, **options: Any) -> None:
        self.asked = options
        if self.error is not None:
            raise self.error


def trained(root: Path, model: Wrapped, errors: Any) -> "RefitCallback":
    """One step of a training."""
    from refitd_client.trainers.transformers import RefitCallback  # here, because every worker imports this module

    callback = RefitCallback(root, "run", errors=errors)
    args: Any = None
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=1)
    callback.on_train_begin(args, state, args, model=model)
    try:
        callback.on_step_end(args, state, args, model=model)
    finally:
        callback.on_train_end(args, state, args)
    return callback


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_temporary_folder_ends_no_training(error: Exception, tmp_path: Path) -> None:
    assert isinstance(trained(tmp_path, Wrapped(error), "log").last_error, StorageError)
    with pytest.raises(StorageError, match="TMPDIR"):
        trained(tmp_path, Wrapped(error), "raise")
    assert versions(tmp_path / "run") == []


def test_the_hub_is_not_asked_for_the_base_model(tmp_path: Path) -> None:
    model = Wrapped()
    trained(tmp_path, model, "log")
    assert model.asked["save_embedding_layers"] is False
