"""What a trainer passes to `publish`, made into the content of a version: shards to write and files beside them.

Tensors are written by several threads. If the caller waits for the commit, each piece is checked, digested and written
while it is in the processor's cache. If it does not, the bytes go into the files first (from there on the caller may
change its tensors), and are checked and digested as they lie in the files. Tensors on GPUs go another way:
`device_shards.py`.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from threading import Event
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from refitd_client import tensors as torch_tensors
from refitd_client.checkpoint.header import Entry
from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.contract.manifest import Claims, TensorsSummary
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, MANIFEST_NAME, ShardLayout
from refitd_client.contract.states import Kind
from refitd_client.errors import InvalidWeightsError, PublishError
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.tensors import HOST, TORCH_NAMES, Casts, SameTensors, TensorSource, casts, numpy_source, refused
from refitd_client.write import plan as shard
from refitd_client.write.device_shards import DeviceShards
from refitd_client.write.fp8_blocks import Fp8Blocks
from refitd_client.write.plan import (
    PIECE,
    ModuleState,
    Rename,
    Shard,
    ShardChecks,
    after,
    checkpoint_names,
    convert,
    published_names,
    second_names,
    without_second_names,
)
from refitd_client.write.source_folder import open_checkpoint
from refitd_client.write.version_folder import StagedShard, Staging

_COMPANION_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NO_COMPANIONS = frozenset({MANIFEST_NAME, "trainer_state.json"})
_START_THREADS_FROM = 8 * 2**20  # bytes that are worth starting threads for


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """The weights of a version as tensors.

    `check_finite` refuses NaN and infinity. With `fingerprinted` the manifest will have the tensors' fingerprints:
    computed on the GPU of those that are there, and of others from their bytes as they pass, at 0.6 GB/s a thread.
    """

    shards: Sequence[Shard]
    check_finite: bool
    fingerprinted: bool = False

    def scanned(self) -> "TensorShards":
        return replace(self, check_finite=False, fingerprinted=False)

    def to_be_scanned(self) -> "TensorShards":
        return replace(self, fingerprinted=True)

    @property
    def sources(self) -> list[TensorSource]:
        return [source for shard in self.shards for source in shard.sources]

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        return {shard.name: shard.entries for shard in self.shards}

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    @property
    def layout(self) -> list[ShardLayout]:
        return [ShardLayout(name=shard.name, header=shard.header, size=shard.size) for shard in self.shards]

    def write(self, staging: Staging) -> None:
        """Write the shards.

        Raises:
            InvalidWeightsError: a tensor holds a value that is not finite.
            NoSpaceError: there is no room for them.
        """
        if (from_gpus := self._begin(staging)) is not None:
            from_gpus.finish()
        else:
            self._share_out(staging, [partial(self._write_checked, staging, shard) for shard in self.shards])

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy the tensors into the files, and return what is left to do: to check, to digest and to sync them.

        The tensors may change as soon as this returns. It raises NoSpaceError; if a tensor is not finite, it or the
        rest raises InvalidWeightsError.
        """
        if (from_gpus := self._begin(staging)) is not None:
            from_gpus.arrive()
            return from_gpus.finish
        pairs = [(shard, staging.open_shard(shard.name)) for shard in self.shards]
        self._share_out(staging, [partial(_fill, staging, shard, file, None) for shard, file in pairs])
        return partial(self._share_out, staging, [partial(self._check, staging, *pair) for pair in pairs])

    def _begin(self, staging: Staging) -> DeviceShards | None:
        """Refuse early what has no room; begin the copies of shards with tensors on GPUs, None if there are none."""
        if not staging.recycled:
            staging.require_space(self.size)
        if all(source.place == HOST for source in self.sources):
            return None
        return DeviceShards(staging, self.shards, check_finite=self.check_finite, fingerprinted=self.fingerprinted)

    def _checks(self, shard: Shard) -> ShardChecks:
        names = [source.entry.name for source in shard.sources] if self.fingerprinted else []
        return ShardChecks(shard.header, check_finite=self.check_finite, fingerprinted=names)

    def _share_out(self, staging: Staging, jobs: Sequence[Callable[[Event], None]]) -> None:
        lanes = lanes_for(len(jobs)) if self.size >= _START_THREADS_FROM else 1
        in_lanes(jobs, lanes=lanes, idle=staging.meter.report if staging.meter.is_watched else None)

    def _write_checked(self, staging: Staging, shard: Shard, stop: Event) -> None:
        file, checks = staging.open_shard(shard.name), self._checks(shard)
        _fill(staging, shard, file, checks, stop)
        staging.fingerprints.update(checks.fingerprints)
        staging.seal(file, shard.size, checks.digest)

    def _check(self, staging: Staging, shard: Shard, file: StagedShard, stop: Event) -> None:
        checks = self._checks(shard)
        for run in shard.runs:
            for begin in range(0, run.size, PIECE):
                if stop.is_set():
                    return
                piece = file.get(run.offset + begin, min(PIECE, run.size - begin))
                checks.add(run.entries, begin, piece)
        staging.fingerprints.update(checks.fingerprints)
        staging.seal(file, shard.size, checks.digest)


def _fill(staging: Staging, shard: Shard, file: StagedShard, checks: ShardChecks | None, stop: Event) -> None:
    """Write all of a shard, checking it on the way."""
    # The header into a slot as well, though it should be there: a slot's bytes mean nothing.
    file.put(0, np.frombuffer(shard.header, dtype=np.uint8))
    staging.meter.add(len(shard.header))
    for run in shard.runs:
        for begin, piece in _pieces(run.read(), stop):
            file.put(run.offset + begin, piece)  # first: it fetches the piece from memory faster than a check does
            if checks is not None:
                checks.add(run.entries, begin, piece)
            staging.meter.add(len(piece))


def _pieces(data: NDArray[np.uint8], stop: Event) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for begin in range(0, len(data), PIECE):
        if stop.is_set():
            raise InterruptedError("another part of this publication has failed")
        yield begin, data[begin : begin + PIECE]


def companions_of(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if is_companion(path.name) and not path.name.endswith(".index.json") and path.is_file()
    ]


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model beside its weights, by its ending."""
    return PurePath(name).suffix in _COMPANION_SUFFIXES and not name.startswith(".") and name not in _NO_COMPANIONS


class BaseModel:
    """The folder of the model that training started from, such as a snapshot in Hugging Face's cache.

    Versions get its configuration and tokenizer files, and of tied weights the names that its checkpoint has. A
    publisher's `dtype` for all tensors leaves each in the dtype that its checkpoint has.
    """

    def __init__(self, folder: Path) -> None:
        """Check that it is a model's folder. Raises PublishError if there is none, or no `config.json` in it."""
        if not (folder / "config.json").is_file():
            raise PublishError(
                f"base_model {folder} has no config.json: give a model's folder "
                "(huggingface_hub.snapshot_download returns one), not its name on a hub"
            )
        self.folder = folder

    @property
    def companions(self) -> list[Path]:
        return companions_of(self.folder)

    @cached_property
    def _dtypes(self) -> dict[str, str] | None:
        try:
            shards = open_checkpoint(self.folder).shards
        except InvalidWeightsError:  # a folder with a tokenizer and a configuration alone is a good base, too
            return None
        return {entry.name: TORCH_NAMES[entry.dtype] for entries in shards.values() for entry in entries}

    def inventory(self) -> frozenset[str] | None:
        """The tensors' names in its checkpoint, None if it has none that can be read. Read once."""
        return None if self._dtypes is None else frozenset(self._dtypes)

    def dtypes(self) -> dict[str, str]:
        """The dtypes in its checkpoint by names, as torch calls them; none if it has none that can be read."""
        return self._dtypes or {}


def casts_for(dtype: Any, base: BaseModel | None) -> Casts:
    """Read a caller's `dtype`, held against the base model. Raises ValueError as `casts` does."""
    read = casts(dtype)
    return read if base is None or not read.rules else replace(read, kept=base.dtypes())


# The values of a publisher's options with which they ask for nothing that files could not have.
_OF_TENSORS: dict[str, tuple[Any, ...]] = {
    "dtype": (None, {}),
    "rename": (None, {}),
    "max_shard_bytes": (None,),
    "fingerprints": (None, False),
    "check_finite": (True,),
    "shadow": ("stream",),
    "durable": ("always", "every=1"),
}


def require_as_it_is(what: str, options: Mapping[str, Any], *, is_adapter: bool) -> None:
    """Refuse options of a publisher that do nothing to files. Raises InvalidWeightsError if one of them is set."""
    idle = _OF_TENSORS | ({"base_model": (None,)} if is_adapter else {})
    given = [f"{name}=" for name, without in idle.items() if options.get(name, without[0]) not in without]
    if given:
        raise InvalidWeightsError(
            f"{what} is published as its files are, and {', '.join(given)} of this publisher would do nothing to it: "
            "leave that out, or publish tensors (safetensors.torch.load_file reads them)"
        )


def fp8_blocks(casts: Casts, base: BaseModel | None) -> Fp8Blocks | None:
    """What quantises weights, if any are to be quantised. Raises PublishError if the base model is quantised in another
    way.
    """
    if not casts.has_fp8_block:
        return None
    return Fp8Blocks(casts, None, None) if base is None else Fp8Blocks(casts, base.folder, base.inventory())


class Weights(Protocol):
    """The shards of a version, from any source."""

    @property
    def tensors(self) -> dict[str, list[Entry]]: ...

    @property
    def size(self) -> int: ...

    @property
    def layout(self) -> Sequence[ShardLayout]:
        """The files of a slot that fits; empty if they are not written into one."""
        ...

    def write(self, staging: Staging) -> None: ...

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Copy their bytes into the files, so that the caller may change its own; return what is left to do."""
        ...


@runtime_checkable
class WeightsOfRanks(Weights, Protocol):
    """Weights of which each rank of a trainer has a part, and no process has all (`sharded/`). `places` say where each
    rank's tensors are. Ranks refuse values that are not finite if `check_finite`.
    """

    @property
    def places(self) -> Sequence[Any]: ...

    @property
    def check_finite(self) -> bool: ...

    def shadows(self) -> Any:
        """Copy all of them, to compare the next ones with the copies (`delta.shadow.VersionShadows`)."""
        ...

    def exported(self, destination: Any) -> Any:
        """On their way to engine ranks (`transport.handover.Exported`)."""
        ...

    def scanned(self) -> Any:
        """The same, whose fingerprints are known, to be written."""
        ...

    def to_be_scanned(self) -> Any:
        """The same, to be written with fingerprints."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A version's shards, the content of their index, and the files to copy beside them. `config` is the content of
    `config.json` where that is not copied.

    A delta has no index: a loader that finds one looks for the files that it names.
    """

    weights: Weights
    index: bytes
    companions: Sequence[Path]
    config: bytes = b""
    claims: Claims = field(default_factory=Claims)

    @property
    def size(self) -> int:
        beside = len(self.index) + len(self.config) + sum(path.stat().st_size for path in self.companions)
        return self.weights.size + beside

    @property
    def tensors(self) -> TensorsSummary:
        shards = self.weights.tensors.values()
        return TensorsSummary.of((entry.dtype, entry.nbytes) for entries in shards for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedContent:
    """What to publish. `kind` is the version's, `why_full` None for a delta. `density` is the share of elements that
    changed in this step.

    `content` makes it. A delta's needs nothing of the caller's tensors, and is made in any thread, once.
    """

    content: Callable[[], Content]
    kind: Kind = Kind.FULL
    why_full: str | None = None
    density: float | None = None


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
    fingerprinted: bool | None  # None: where all tensors are on GPUs
    blocks: Fp8Blocks | None = None
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the publisher's options, as it was given them
    _same: SameTensors[tuple[TensorShards, bytes, bytes]] = field(
        default_factory=SameTensors[tuple[TensorShards, bytes, bytes]], init=False
    )

    def content(self, weights: Any) -> Content:
        """Recognise the weights, and check what can be checked without reading tensors. Raises InvalidWeightsError if
        it cannot be a version.
        """
        if isinstance(weights, Content):  # from several ranks, which agreed on it before (`sharded/`)
            return weights
        if isinstance(weights, (str, os.PathLike)):
            return self._files(Path(cast("str | os.PathLike[str]", weights)))
        if torch_tensors.is_module(weights):
            if self.rename is None and hasattr(weights, "peft_config"):
                raise InvalidWeightsError(_WRAPPED)
            weights = ModuleState(weights, weights.state_dict())
        if isinstance(weights, ModuleState):
            state, second = weights, torch_tensors.tied_patterns(weights.module)
            names = checkpoint_names(weights.module, state, self._inventory)
            if names is None:
                state, names = convert(weights.module, state), {}
            return self._tensors(state, second, after(names, self.rename))
        if isinstance(weights, Mapping):
            return self._tensors(cast("Mapping[Any, Any]", weights), (), self.rename)
        raise InvalidWeightsError(
            f"weights are a {type(weights).__name__}: pass a state dict, an nn.Module or a checkpoint's folder"
        )

    def release(self) -> None:
        """Drop the references to the tensors that were read last."""
        self._same.let_go()

    def _inventory(self) -> frozenset[str] | None:
        return None if self.base_model is None else self.base_model.inventory()

    def _files(self, folder: Path) -> Content:
        if not folder.is_dir():
            raise InvalidWeightsError(f"{folder} is not a folder: pass the one that the checkpoint was saved to")
        checkpoint, companions = open_checkpoint(folder, once=True), companions_of(folder)
        require_as_it_is(f"the folder {folder}", self.given, is_adapter=checkpoint.is_adapter)
        if checkpoint.is_adapter:  # no index: engines would look for the model that it names
            own = [path for path in companions if path.name == ADAPTER_CONFIG_NAME]
            if not own:
                raise InvalidWeightsError(f"{folder} holds an adapter without its {ADAPTER_CONFIG_NAME}")
            return Content(weights=checkpoint, index=b"", companions=own, claims=Claims(kind=Kind.LORA))
        return self._content(checkpoint, shard.index_json(checkpoint.tensors), b"", companions)

    def _tensors(self, state: Mapping[Any, Any], second: Sequence[str], rename: Rename | None) -> Content:
        for name in state:
            if not isinstance(name, str):
                raise InvalidWeightsError(f"a state dict's keys are names, and {name!r} is a {type(name).__name__}")
        names = published_names(state.keys(), rename)
        made = self._same.again(state, (names, *second))
        if made is None:
            sources = {old: _source(new, state[old], self.casts) for old, new in names.items()}
            blocks = self.blocks
            published = [
                part for each in sources.values() for part in ([each] if blocks is None else blocks.sources(each))
            ]
            patterns = [f"^{re.escape(name)}$" for name in second_names(names, second)]
            kept = without_second_names(published, inventory=self._inventory, second=patterns)
            on_gpus = bool(kept) and all(source.place != HOST for source in kept)
            shards = TensorShards(
                shards=shard.cut(kept, max_shard_bytes=self.max_shard_bytes),
                check_finite=self.check_finite,
                fingerprinted=on_gpus if self.fingerprinted is None else self.fingerprinted,
            )
            config = b"" if blocks is None else blocks.config(source.entry for source in kept)
            made = shards, shard.index_json(shards.tensors), config
            self._same.keep(state, (names, *second), [sources.get(name) for name in state], made)
        return self._content(*made, ())

    def _content(self, weights: Weights, index: bytes, config: bytes, own: Sequence[Path]) -> Content:
        base = self.base_model.companions if self.base_model is not None else []
        companions = {path.name: path for path in [*base, *own]}  # the checkpoint's own win
        if config:
            companions.pop(CONFIG_NAME, None)
        return Content(weights=weights, index=index, config=config, companions=list(companions.values()))


def _source(name: str, value: Any, casts: Casts) -> TensorSource:
    if torch_tensors.is_tensor(value):
        return torch_tensors.torch_source(name, value, casts)
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        if casts.target(name, array.dtype.name) != array.dtype.name:
            raise refused(name, "is a numpy array, which is not cast: cast it before, or pass torch tensors")
        return numpy_source(name, array)
    raise refused(name, f"is a {type(value).__module__}.{type(value).__name__}: pass torch tensors or numpy arrays")
