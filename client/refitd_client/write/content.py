"""What a trainer passes to `publish`, made into the content of a version: shards to write and files beside them."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import Claims, TensorsSummary
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME
from refitd_client.contract.slot import ShardLayout
from refitd_client.contract.states import Kind
from refitd_client.errors import InvalidWeightsError, PublishError
from refitd_client.tensors import from_torch as torch_tensors
from refitd_client.tensors.names import Rename, published_names, second_names, without_second_names
from refitd_client.tensors.reuse import SameTensors
from refitd_client.tensors.source import Casts, TensorSource, numpy_source, refused
from refitd_client.write import plan as shard
from refitd_client.write.shards import TensorShards
from refitd_client.write.source_folder import companions_of, open_checkpoint
from refitd_client.write.version_folder import Staging


class BaseModel:
    """The folder of the model that training started from, such as a snapshot in Hugging Face's cache.

    Versions get its configuration and tokenizer files, and of tied weights the names that its checkpoint has.
    """

    def __init__(self, folder: Path) -> None:
        """Check that it is a model's folder.

        Raises:
            PublishError: there is no such folder, or no `config.json` in it.
        """
        if not (folder / "config.json").is_file():
            raise PublishError(
                f"base_model {folder} has no config.json: give a model's folder "
                "(huggingface_hub.snapshot_download returns one), not its name on a hub"
            )
        self.folder = folder

    @property
    def companions(self) -> list[Path]:
        """Its configuration and tokenizer files."""
        return companions_of(self.folder)

    @cached_property
    def _names(self) -> frozenset[str] | None:
        try:
            shards = open_checkpoint(self.folder).shards
        except InvalidWeightsError:  # a folder with a tokenizer and a configuration alone is a good base, too
            return None
        return frozenset(entry.name for entries in shards.values() for entry in entries)

    def inventory(self) -> frozenset[str] | None:
        """The tensors' names in its checkpoint, None if it has none that can be read. Read once."""
        return self._names


class Weights(Protocol):
    """The shards of a version, from any source."""

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """The tensors in each, by the shard's name."""
        ...

    @property
    def size(self) -> int:
        """The bytes that they take."""
        ...

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """The files of a slot that fits; empty if they are not written into one."""
        ...

    def write(self, staging: Staging) -> None:
        """Write them."""
        ...

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy their bytes into the files, so that the caller may change its own; return what is left to do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A version's shards, the content of their index, and the files to copy beside them.

    A delta has no index: a loader that finds one looks for the files that it names.
    """

    weights: Weights
    index: bytes
    companions: Sequence[Path]
    claims: Claims = field(default_factory=Claims)

    @property
    def size(self) -> int:
        """The bytes of all files but the manifest."""
        return self.weights.size + len(self.index) + sum(path.stat().st_size for path in self.companions)

    @property
    def tensors(self) -> TensorsSummary:
        """The summary of its tensors, for the manifest."""
        shards = self.weights.tensors.values()
        return TensorsSummary.of((entry.dtype, entry.nbytes) for entries in shards for entry in entries)


_WRAPPED = (
    "the model is wrapped by peft, and its names are no engine's: publish its adapter (model.save_pretrained(DIR), "
    "then publish(DIR), to a service with --lora NAME; RefitCallback does both), or the whole model "
    "(model.merge_and_unload())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReader:
    """Makes content of what a publisher is passed, by the publisher's options. One caller at a time."""

    base_model: BaseModel | None
    max_shard_bytes: int | None
    check_finite: bool
    casts: Casts
    rename: Rename | None
    fingerprinted: bool
    _same: SameTensors[tuple[TensorShards, bytes]] = field(
        default_factory=SameTensors[tuple[TensorShards, bytes]], init=False
    )

    def content(self, weights: Any) -> Content:
        """Recognise the weights, and check what can be checked without reading tensors.

        Raises:
            InvalidWeightsError: it cannot be a version.
        """
        if isinstance(weights, Content):  # from several ranks, which agreed on it before (`sharded/`)
            return weights
        if isinstance(weights, (str, os.PathLike)):
            folder = Path(cast("str | os.PathLike[str]", weights))
            if not folder.is_dir():
                raise InvalidWeightsError(f"{folder} is not a folder: pass the one that the checkpoint was saved to")
            checkpoint = open_checkpoint(folder)
            if checkpoint.is_adapter:  # no index: engines would look for the model that it names
                own = [path for path in checkpoint.companions if path.name == ADAPTER_CONFIG_NAME]
                if not own:
                    raise InvalidWeightsError(f"{weights} holds an adapter without its {ADAPTER_CONFIG_NAME}")
                return Content(weights=checkpoint, index=b"", companions=own, claims=Claims(kind=Kind.LORA))
            return self._content(checkpoint, shard.index_json(checkpoint.tensors), checkpoint.companions)
        if torch_tensors.is_module(weights):
            if self.rename is None and hasattr(weights, "peft_config"):
                raise InvalidWeightsError(_WRAPPED)
            second = torch_tensors.tied_patterns(weights)
            return self._tensors(weights.state_dict(), second)
        if isinstance(weights, Mapping):
            return self._tensors(cast("Mapping[Any, Any]", weights), ())
        raise InvalidWeightsError(
            f"weights are a {type(weights).__name__}: pass a state dict, an nn.Module or a checkpoint's folder"
        )

    def release(self) -> None:
        """Drop the references to the tensors that were read last."""
        self._same.let_go()

    def _tensors(self, state: Mapping[Any, Any], second: Sequence[str]) -> Content:
        for name in state:
            if not isinstance(name, str):
                raise InvalidWeightsError(f"a state dict's keys are names, and {name!r} is a {type(name).__name__}")
        names = published_names(state.keys(), self.rename)
        made = self._same.again(state, (names, *second))
        if made is None:
            sources = {old: _source(new, state[old], self.casts) for old, new in names.items()}
            patterns = [f"^{re.escape(name)}$" for name in second_names(names, second)]
            inventory = self.base_model.inventory if self.base_model is not None else lambda: None
            kept = without_second_names(list(sources.values()), inventory=inventory, second=patterns)
            shards = TensorShards(
                shards=shard.cut(kept, max_shard_bytes=self.max_shard_bytes),
                check_finite=self.check_finite,
                fingerprinted=self.fingerprinted,
            )
            made = shards, shard.index_json(shards.tensors)
            self._same.keep(state, (names, *second), [sources.get(name) for name in state], made)
        return self._content(*made, ())

    def _content(self, weights: Weights, index: bytes, own: Sequence[Path]) -> Content:
        base = self.base_model.companions if self.base_model is not None else []
        companions = {path.name: path for path in [*base, *own]}  # the checkpoint's own win
        return Content(weights=weights, index=index, companions=list(companions.values()))


def _source(name: str, value: Any, casts: Casts) -> TensorSource:
    if torch_tensors.is_tensor(value):
        return torch_tensors.source(name, value, casts)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        if casts.target(name, array.dtype.name) != array.dtype.name:
            raise refused(name, "is a numpy array, which is not cast: cast it before, or pass torch tensors")
        return numpy_source(name, array)
    raise refused(name, f"is a {type(value).__module__}.{type(value).__name__}: pass torch tensors or numpy arrays")
