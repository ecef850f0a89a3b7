"""What a trainer passes to `publish`, made into the content of a version: shards to write and files beside them."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import Claims, TensorsSummary
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME
from refitd_client.contract.slot import ShardLayout
from refitd_client.contract.states import Kind
from refitd_client.errors import InvalidWeightsError
from refitd_client.tensors import from_numpy as numpy_tensors
from refitd_client.tensors import from_torch as torch_tensors
from refitd_client.tensors.casts import Casts
from refitd_client.tensors.names import Rename, published_names, second_names
from refitd_client.tensors.reuse import SameTensors
from refitd_client.tensors.source import TensorSource, refused
from refitd_client.tensors.tied import without_second_names
from refitd_client.write import plan as shard
from refitd_client.write.base_model import BaseModel
from refitd_client.write.shards import TensorShards
from refitd_client.write.source_folder import open_checkpoint
from refitd_client.write.version_folder import Staging


class Weights(Protocol):
    """The shards of a version, wherever they come from."""

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """What is in each, by the shard's name."""
        ...

    @property
    def size(self) -> int:
        """The bytes that they take."""
        ...

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """What a slot has to look like for them; nothing where they are not written into one."""
        ...

    def write(self, staging: Staging) -> None:
        """Write them."""
        ...

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Have their bytes in the files, so that the caller may change its own; return what is left to do."""
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
        """What the manifest says of its tensors."""
        return header.summary([entry for entries in self.weights.tensors.values() for entry in entries])


_WRAPPED = (
    "the model is wrapped by peft, and its names are no engine's: publish its adapter (model.save_pretrained(DIR), "
    "then publish(DIR), to a service with --lora NAME; RefitCallback does both), or the whole model "
    "(model.merge_and_unload())"
)


def _nothing_yet() -> SameTensors[tuple[TensorShards, bytes]]:
    return SameTensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a publisher reads what it is passed."""

    base_model: BaseModel | None
    max_shard_bytes: int | None
    check_finite: bool
    casts: Casts
    rename: Rename | None
    fingerprinted: bool
    _same: SameTensors[tuple[TensorShards, bytes]] = field(default_factory=_nothing_yet, init=False)

    def content(self, weights: Any) -> Content:
        """See what it is, and check what can be checked without reading tensors.

        Raises:
            InvalidWeightsError: it cannot be a version.
        """
        if isinstance(weights, Content):  # from several ranks, which agreed on it before (`sharded/`)
            return weights
        if isinstance(weights, (str, os.PathLike)):
            checkpoint = open_checkpoint(_folder(weights))
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
            return self._tensors(torch_tensors.module_state(weights), second)
        if isinstance(weights, Mapping):
            return self._tensors(cast("Mapping[Any, Any]", weights), ())
        raise InvalidWeightsError(
            f"weights are a {type(weights).__name__}: pass a state dict, an nn.Module or a checkpoint's folder"
        )

    def let_go(self) -> None:
        """Nothing of what was read last is needed any more."""
        self._same.let_go()

    def _tensors(self, state: Mapping[Any, Any], second: Sequence[str]) -> Content:
        _check_names(state)
        names = published_names(state.keys(), self.rename)
        made = self._same.again(state, (names, *second))
        if made is None:
            sources = {old: _source(new, state[old], self.casts) for old, new in names.items()}
            cut = self._cut(list(sources.values()), second_names(names, second))
            made = cut, shard.index_json(cut.tensors)
            self._same.keep(state, (names, *second), [sources.get(name) for name in state], made)
        return self._content(*made, ())

    def _cut(self, sources: Sequence[TensorSource], second: Collection[str]) -> TensorShards:
        inventory = self.base_model.inventory if self.base_model is not None else _no_inventory
        patterns = [f"^{re.escape(name)}$" for name in second]
        sources = without_second_names(sources, inventory=inventory, second=patterns)
        return TensorShards(
            shards=shard.cut(sources, max_shard_bytes=self.max_shard_bytes),
            check_finite=self.check_finite,
            fingerprinted=self.fingerprinted,
        )

    def _content(self, weights: Weights, index: bytes, own: Sequence[Path]) -> Content:
        base = self.base_model.companions if self.base_model is not None else []
        companions = {path.name: path for path in [*base, *own]}  # the checkpoint's own win
        return Content(weights=weights, index=index, companions=list(companions.values()))


def _no_inventory() -> None:
    return None


def _folder(weights: Any) -> Path:
    folder = Path(weights)
    if not folder.is_dir():
        raise InvalidWeightsError(f"{folder} is not a folder: pass the one that the checkpoint was saved to")
    return folder


def _check_names(state: Mapping[Any, Any]) -> None:
    for name in state:
        if not isinstance(name, str):
            raise InvalidWeightsError(f"a state dict's keys are names, and {name!r} is a {type(name).__name__}")


def _source(name: str, value: Any, casts: Casts) -> TensorSource:
    if torch_tensors.is_tensor(value):
        return torch_tensors.source(name, value, casts)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        if casts.target(name, array.dtype.name) != array.dtype.name:
            raise refused(name, "is a numpy array, which is not cast: cast it before, or pass torch tensors")
        return numpy_tensors.source(name, array)
    raise refused(name, f"is a {type(value).__module__}.{type(value).__name__}: pass torch tensors or numpy arrays")
