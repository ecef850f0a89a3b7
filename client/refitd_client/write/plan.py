"""Which tensors a version has, by which names, and which file holds which, and where.

    names       from a trainer's names to those that engines know; which names of tied weights are written
    files       model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json
    checks      what is found out about the bytes of a file as they pass

Wrappers leave their mark in names: `_fsdp_wrapped_module.` (FSDP), `_checkpoint_wrapped_module.` (activation
checkpointing), `_orig_mod.` (torch.compile), wherever they stand, and a `module.` before every name (DDP). No model of
a hub has such names, so the marks are removed, and the caller's own `rename` gets the model's name. A `module.` before
some of the names only is the model's own.

Two names of the same memory (`lm_head.weight` and `model.embed_tokens.weight`) are one tensor. A checkpoint with both
names has one tensor more than the engines' model may have, and is rejected for it; one with too few is rejected, too.
The base model's own checkpoint decides what the model expects, without one the module's declaration. Without either,
every name is written, with its own bytes.

The names of a module's checkpoint are not always the module's own: transformers 5 renames tensors as it loads many
models (LLaVA, Qwen2.5-VL, Gemma 3), and fuses experts into one tensor; `save_pretrained` reverts that. What a trainer
publishes is reverted in the same way, by the same function: a rename copies nothing, and where tensors have to be
converted, the converted ones are new. transformers is not imported: a caller with one of its models has imported it.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from refitd_client.checkpoint import header
from refitd_client.checkpoint.finite import any_nonfinite, count_nonfinite
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import FileDigest
from refitd_client.errors import InvalidWeightsError
from refitd_client.fingerprint import Bits, bits_of, fingerprint, fingerprints_together, width_of
from refitd_client.tensors import TensorSource, joins, read_together, refused

Rename = Mapping[str, str | None] | Callable[[str], str | None]

_MARKS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_DDP = "module."


def published_names(names: Collection[str], rename: Rename | None = None) -> dict[str, str]:
    """The published name of each tensor, by the trainer's. Names that are renamed to None are left out.

    A mapping leaves the names that it does not hold as they are.

    Raises:
        InvalidWeightsError: two tensors would have one name, or a name is no text.
    """
    published: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, plain in plain_names(names).items():
        new: Any = plain
        if rename is not None:
            new = rename(plain) if callable(rename) else rename.get(plain, plain)
        if new is None:
            continue
        if not (isinstance(new, str) and new):
            raise InvalidWeightsError(f"rename makes {new!r} of tensor {plain}: give a name, or None to leave it out")
        if taken.setdefault(new, name) != name:
            raise InvalidWeightsError(f"tensors {taken[new]} and {name} would both be published as {new}", tensor=name)
        published[name] = new
    return published


def plain_names(names: Collection[str]) -> dict[str, str]:
    plain = {name: without_marks(name) for name in names}
    if plain and all(name.startswith(_DDP) for name in plain.values()):
        return {name: new.removeprefix(_DDP) for name, new in plain.items()}
    return plain


def second_names(names: Mapping[str, str], patterns: Iterable[str]) -> set[str]:
    """The published names of those of the trainer's names that match a pattern; `names` are published by trainer's."""
    regular = [re.compile(without_marks(pattern)) for pattern in patterns]
    return {new for old, new in names.items() if any(each.search(without_marks(old)) for each in regular)}


def without_marks(name: str) -> str:
    """A name, or a pattern for names, without the marks that wrappers leave within."""
    for mark in _MARKS:
        name = name.replace(mark, "")
    return name


def without_second_names(
    sources: Sequence[TensorSource],
    *,
    inventory: Callable[[], frozenset[str] | None],
    second: Sequence[str] = (),
) -> list[TensorSource]:
    """Leave out the names that the model does not expect beside another name for the same memory.

    `inventory` returns the names in the base model's checkpoint, None if there is none; it is called only where names
    share memory. `second` are regular expressions for names that the module declares to be second names.
    """
    by_memory: dict[Hashable, list[str]] = defaultdict(list)
    for source in sources:
        if source.memory is not None:
            by_memory[source.memory].append(source.entry.name)
    groups = [names for names in by_memory.values() if len(names) > 1]
    if not groups:
        return list(sources)
    expected = inventory()
    dropped: set[str] = set()
    for names in groups:
        if expected is not None:
            unwanted = [name for name in names if name not in expected]
        else:
            unwanted = [name for name in names if any(re.search(pattern, name) for pattern in second)]
        if len(unwanted) < len(names):
            dropped.update(unwanted)
    return [source for source in sources if source.entry.name not in dropped]


# Digests and page faults of one file are one thread's work: that many files keep that many processors busy.
_LEAST_FILES = 16
_LEAST_SHARD, _MOST_SHARD = 64 * 10**6, 5 * 10**9

PIECE = 2**20
"""Bytes that `ShardChecks` takes at a time: few enough to be in the processor's cache for the check, the digest and the
copy, and enough for threads to be seldom in each other's way: they take turns at the interpreter between these."""


_TOGETHER = 2**18  # bytes of a run: with what the checks make of them they stay in the processor's cache


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbours in a file that are read, written, checked and digested together; a large tensor is one by itself.

    A call costs microseconds, which is more than the bytes of a small tensor do. `offset` is of its first byte.
    """

    offset: int
    sources: Sequence[TensorSource]

    @cached_property
    def entries(self) -> list[Entry]:
        return [source.entry for source in self.sources]

    @cached_property
    def size(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def _is_together(self) -> bool:
        return all(joins(one, other) for one, other in pairwise(self.sources))

    def read(self) -> NDArray[np.uint8]:
        if len(self.sources) == 1:
            return self.sources[0].read()
        if self._is_together:
            return read_together(self.sources)
        return np.concatenate([source.read() for source in self.sources])


def runs_of(sources: Iterable[TensorSource], offset: int = 0) -> list[Run]:
    """Runs of tensors that lie one after the other, the first at byte `offset`."""
    runs: list[Run] = []
    together: list[TensorSource] = []
    room = 0
    for source in sources:
        size = source.entry.nbytes
        if together and size <= room and joins(together[-1], source):
            together.append(source)
        else:
            together, room = [source], _TOGETHER
            runs.append(Run(offset=offset, sources=together))
        room -= size
        offset += size
    return runs


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: its name, the bytes before the tensors, and the tensors as they lie in it."""

    name: str
    header: bytes
    sources: Sequence[TensorSource]

    @cached_property
    def entries(self) -> list[Entry]:
        return [source.entry for source in self.sources]

    @cached_property
    def size(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    @property
    def placed(self) -> Iterator[tuple[int, TensorSource]]:
        """Its tensors, each with the offset of its first byte in the file."""
        offset = len(self.header)
        for source in self.sources:
            yield offset, source
            offset += source.entry.nbytes

    @cached_property
    def runs(self) -> list[Run]:
        """Its tensors in the order of the file, small neighbours of one dtype together."""
        return runs_of(self.sources, len(self.header))


def cut(sources: Sequence[TensorSource], *, max_shard_bytes: int | None) -> list[Shard]:
    """Cut tensors into shards of at most `max_shard_bytes`, in the order given. A larger tensor has one to itself.

    None makes about 16 shards, of 64 MB to 5 GB each.

    Raises:
        InvalidWeightsError: there are none, or too many for a shard.
    """
    if max_shard_bytes is None:
        total = sum(source.entry.nbytes for source in sources)
        max_shard_bytes = min(max(-(-total // _LEAST_FILES), _LEAST_SHARD), _MOST_SHARD)
    parts: list[list[TensorSource]] = []
    room = 0
    for source in sources:
        if not parts or source.entry.nbytes > room:
            parts.append([])
            room = max_shard_bytes
        parts[-1].append(source)
        room -= source.entry.nbytes
    if not parts:
        raise InvalidWeightsError("there are no tensors to publish: the state dict is empty")
    shards: list[Shard] = []
    for number, part in enumerate(parts, 1):
        part.sort(key=lambda source: header.file_order(source.entry))
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        shards.append(Shard(name=name, header=header.encode(source.entry for source in part), sources=part))
    return shards


def index_json(shards: Mapping[str, Sequence[Entry]]) -> bytes:
    """The index: which tensor is in which shard, as Hugging Face's loaders and SGLang's read it."""
    weight_map = {entry.name: name for name, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


class ShardChecks:
    """What is found out about a shard's bytes as they pass: that they are finite, their digest, their fingerprints.

    Takes the bytes of a shard in order, each tensor in pieces of `PIECE` bytes.
    """

    def __init__(self, head: bytes, *, check_finite: bool, fingerprinted: Iterable[str]) -> None:
        """Begin a shard with the bytes before its tensors. `fingerprinted` are the names of the tensors whose
        fingerprints are wanted.
        """
        self.fingerprints = dict.fromkeys(fingerprinted, 0)
        self._digest = FileDigest()
        self._digest.update(head)
        self._check_finite = check_finite
        self._bad = 0  # elements of the tensor that is passing

    @property
    def digest(self) -> str:
        return self._digest.text

    def add(self, entries: Sequence[Entry], begin: int, piece: NDArray[np.uint8]) -> None:
        """Take bytes of a run: of a single tensor those from byte `begin` on, of several tensors all. Raises
        InvalidWeightsError if they end a tensor that has elements that are NaN or infinite, and that is refused.
        """
        last = entries[-1]
        if self._check_finite and any_nonfinite(last.dtype, piece):
            for entry, part in _parts(entries, piece):
                self._bad += count_nonfinite(entry.dtype, part)
                if self._bad and (len(entries) > 1 or begin + len(part) == entry.nbytes):
                    raise not_finite(entry.name, self._bad)
        if self._bad and begin + len(piece) == last.nbytes:
            raise not_finite(last.name, self._bad)
        self._digest.update(piece.data)
        if last.name in self.fingerprints:
            self._fingerprint(entries, begin, bits_of(piece, width_of(last.dtype)))

    def _fingerprint(self, entries: Sequence[Entry], begin: int, bits: Bits) -> None:
        if len(entries) > 1:
            sizes = np.array([entry.nbytes // bits.itemsize for entry in entries])
            names = (entry.name for entry in entries)
            self.fingerprints.update(zip(names, fingerprints_together(bits, sizes), strict=True))
            return
        name = entries[0].name
        more = fingerprint(bits, first=begin // bits.itemsize)
        self.fingerprints[name] = (self.fingerprints[name] + more) % 2**64


def _parts(entries: Sequence[Entry], piece: NDArray[np.uint8]) -> Iterator[tuple[Entry, NDArray[np.uint8]]]:
    if len(entries) == 1:
        yield entries[0], piece
        return
    begin = 0
    for entry in entries:
        yield entry, piece[begin : begin + entry.nbytes]
        begin += entry.nbytes


def not_finite(name: str, count: int, where: str = "") -> InvalidWeightsError:
    """The error for a tensor with so many values that are NaN or infinite; `where`, if not in all of it."""
    values = "1 value that is" if count == 1 else f"{count} values that are"
    return refused(
        name,
        f"holds {values} NaN or infinite{where}: the training step that made it went wrong, and engines would answer "
        "with noise. Publish an earlier step's weights, or go on training from its checkpoint",
    )


def changes_not_finite(name: str, count: int) -> InvalidWeightsError:
    """The error for a tensor of whose values so many changed into NaN or infinity."""
    values = "1 changed value that is" if count == 1 else f"{count} changed values that are"
    return refused(name, f"has {values} NaN or infinite: the training step that made it went wrong")


_SAVED = "publish the folder that its save_pretrained writes"


class ModuleState(dict[str, Any]):
    """A module's state dict as a trainer has gathered it, where the module itself may hold parts alone."""

    def __init__(self, module: Any, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.module = module


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is reverted of tensors with these names, shapes and dtypes. `renamed` is None if some are converted."""

    facts: list[tuple[Any, ...]]
    found: frozenset[str]
    renamed: dict[str, str] | None


_plans: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()  # by models: making one takes longer than a small step


def checkpoint_names(
    module: Any, state: Mapping[str, Any], expected: Callable[[], frozenset[str] | None] = lambda: None
) -> dict[str, str] | None:
    """The checkpoint's names by the module's plain ones; None if tensors have to be converted as well (`convert`).

    `expected` returns the names in the base model's checkpoint, None if there is none: a module that has them already
    keeps them.

    Raises:
        InvalidWeightsError: transformers cannot say what the checkpoint has.
    """
    model = _pretrained(module)
    if model is None:
        return {}
    plain = plain_names(state)
    facts = [(plain[name], value.shape, value.dtype) for name, value in state.items()]
    if (plan := _plans.get(model)) is None or plan.facts != facts:
        plan = _plans[model] = _plan(model, facts)
    own = frozenset(plain.values())
    base = expected() if plan.found != own else None
    if base is not None and len(base & own) >= len(base & plan.found):
        return {}
    return plan.renamed


def convert(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The module's tensors as its checkpoint has them. Raises InvalidWeightsError if they cannot be converted."""
    plain = plain_names(state)
    return _reverted(_pretrained(module), {plain[name]: value for name, value in state.items()})


def _plan(model: Any, facts: list[tuple[Any, ...]]) -> _Plan:
    torch = sys.modules["torch"]
    empty: dict[str, Any] = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in facts}
    found = _reverted(model, dict(empty))
    old = {id(value): name for name, value in empty.items()}
    is_renamed = len(found) == len(empty) and all(id(value) in old for value in found.values())
    renamed = {old[id(value)]: name for name, value in found.items()} if is_renamed else None
    return _Plan(facts, frozenset(found), renamed)


def after(names: Mapping[str, str], rename: Rename | None) -> Rename | None:
    """The caller's `rename` of the checkpoint's names, for a module's."""
    if not names:
        return rename

    def both(plain: str) -> str | None:
        name = names.get(plain, plain)
        if rename is None:
            return name
        return rename(name) if callable(rename) else rename.get(name, name)

    return both


def _pretrained(module: Any) -> Any:
    """The transformers model that a module is or wraps; None if it is none, or one of a release before 5."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or "transformers.core_model_loading" not in sys.modules:
        return None
    while module is not None and not isinstance(module, modeling.PreTrainedModel):
        module = getattr(module, "_orig_mod", None) or getattr(module, "module", None)
    return module


def _reverted(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    core: Any = sys.modules["transformers.core_model_loading"]
    try:
        return core.revert_weight_conversion(model, state)
    except Exception as error:
        kind = type(model).__name__
        why = f"{type(error).__name__}: {error}"[:100]
        raise InvalidWeightsError(
            f"{kind} has other tensors than its checkpoint, and transformers cannot convert them back ({why}): {_SAVED}"
        ) from error
