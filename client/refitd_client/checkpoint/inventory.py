"""The tensors of a checkpoint by name, and how two such inventories differ.

SGLang loads half a checkpoint with status 200, and a tensor of another shape kills it. Hence a checkpoint is compared
with the model that the engines serve before any engine loads it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import takewhile

import xxhash

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.header import BoundedCache, Header

_HEADS = frozenset({"lm_head", "embed_out", "output_layer"})
_EMBEDDINGS = frozenset(
    {"embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "tok_embeddings", "shared"}
)
_RECOMPUTED = ".rotary_emb.inv_freq"  # old checkpoints hold it; every loader skips it and computes it
_CASTABLE = frozenset({"F64", "F32", "BF16", "F16"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its safetensors dtype, its shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Inventory:
    """The tensors of a model or checkpoint by name."""

    tensors: Mapping[str, Tensor]

    @cached_property
    def digest(self) -> str:
        """`xxh3:` and 32 hex digits over names, dtypes and shapes. Equal for equal models, however they are sharded."""
        hasher = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors.items()):
            hasher.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\n".encode())
        return f"xxh3:{hasher.hexdigest()}"

    @cached_property
    def pairs(self) -> Mapping[str, str]:
        """Each output layer, and the embedding that it is a second name of where a model ties the two: an engine reads
        one of them. In a model of several parts that is the embedding of the same part.
        """
        layers = {name: name.split(".")[:-1] for name in self.tensors if name.endswith(".weight")}
        embeddings = {name: parts for name, parts in layers.items() if parts[-1] in _EMBEDDINGS}
        found: dict[str, str] = {}
        for name, parts in layers.items():
            if parts[-1] in _HEADS and embeddings:
                found[name] = min(embeddings, key=lambda each: (_distance(parts[:-1], embeddings[each][:-1]), each))
        return found


def _distance(first: list[str], second: list[str]) -> int:
    common = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], zip(first, second, strict=False)))
    return len(first) + len(second) - 2 * common


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that checkpoints are compared with. `source`: its folder.

    `tied`: its configuration says that its output layer is its embedding. `copies` are the output layers that it stores
    all the same, and whose bytes are the embedding's. `unstored` are tensors that its index names and no file has, and
    `warnings` what else is wrong with its files: a checkpoint is not to blame for either.
    """

    inventory: Inventory
    tied: bool
    source: str
    copies: frozenset[str] = frozenset()
    unstored: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    def pairs_in(self, checkpoint: Inventory) -> Mapping[str, str]:
        """The output layers of a checkpoint that have to be copies of its embeddings, and those."""
        return checkpoint.pairs if self.tied else {}


def not_a_copy(layer: str, embedding: str) -> str:
    """What is wrong with an output layer that should be a copy of its embedding, and what to do."""
    return (
        f"{layer} differs from {embedding}, and the engines' model ties them (tie_word_embeddings): engines would "
        f"serve one of the two. Set it to false in that model's config.json and restart them, or leave {layer} out"
    )


class Difference(StrEnum):
    """How a tensor of a checkpoint can differ from the reference's."""

    MISSING = "missing"
    SHAPE = "shape"
    DTYPE = "dtype"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True)
class Different:
    """One tensor that differs. `found` is None where it is missing, `expected` where it is extra."""

    kind: Difference
    name: str
    found: Tensor | None
    expected: Tensor | None

    def __str__(self) -> str:
        where = f" in {self.found.file}" if self.found is not None and self.found.file is not None else ""
        if self.found is None:
            return f"tensor {self.name} ({self.expected}) is missing"
        if self.expected is None:
            return f"tensor {self.name} ({self.found}){where} is one that the model does not have"
        return f"tensor {self.name}{where} is {self.found} where the model has {self.expected}"


def compare(
    checkpoint: Inventory,
    reference: Reference,
    *,
    allow_missing: Collection[str] = (),
    allow_extra: bool = False,
    allow_dtype_cast: bool = False,
) -> list[Different]:
    """How a checkpoint differs from the model that it is for, in what is not allowed to differ.

    Where the reference is tied, an output layer may be missing if the model's own is a copy of its embedding, and may
    be there in the embedding's shape: its bytes say whether it is a copy. `allow_missing` are patterns
    of names. With `allow_dtype_cast` F64, F32, BF16 and F16 may stand for each other. A shape may never differ.
    """
    key = id(checkpoint), id(reference), *allow_missing, allow_extra, allow_dtype_cast
    agreed = _agreed.get(key)
    if agreed is not None and agreed[0] is checkpoint and agreed[1] is reference:
        return []
    expected = reference.inventory.tensors
    if pairs := reference.pairs_in(checkpoint):
        expected = {copy: expected[first] for copy, first in pairs.items() if first in expected} | dict(expected)
    found = _differences(checkpoint.tensors, expected, allow_dtype_cast=allow_dtype_cast)
    may_miss, may_have = (reference.copies if reference.tied else frozenset[str]()), reference.unstored
    differences = [
        difference
        for difference in found
        if not (
            difference.kind is Difference.MISSING
            and (difference.name in may_miss or any(fnmatchcase(difference.name, each) for each in allow_missing))
        )
        and not (difference.kind is Difference.EXTRA and (allow_extra or difference.name in may_have))
        and not (difference.kind in {Difference.MISSING, Difference.EXTRA} and difference.name.endswith(_RECOMPUTED))
    ]
    if not differences:
        _agreed.put(key, (checkpoint, reference))
    return differences


_agreed: BoundedCache[tuple[object, ...], tuple[Inventory, Reference]] = BoundedCache(16)
"""Checkpoints and models that were found to agree. Versions of one layout have one inventory (`layout_of`)."""


def listed(differences: Iterable[Different], limit: int = 3) -> str:
    """The first few differences in one sentence, "…; and 12 more"."""
    sentences = [str(difference) for difference in differences]
    more = [f"and {len(sentences) - limit} more"] if len(sentences) > limit else []
    return "; ".join(sentences[:limit] + more)


def _differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, allow_dtype_cast: bool
) -> Iterator[Different]:
    for name, want in expected.items():
        have = found.get(name)
        if have is None:
            yield Different(Difference.MISSING, name, None, want)
        elif have.shape != want.shape:
            yield Different(Difference.SHAPE, name, have, want)
        elif have.dtype != want.dtype and not (allow_dtype_cast and {have.dtype, want.dtype} <= _CASTABLE):
            yield Different(Difference.DTYPE, name, have, want)
    for name, have in found.items():
        if name not in expected:
            yield Different(Difference.EXTRA, name, have, None)


def inventory_of(headers: Mapping[str, Header]) -> Inventory:
    tensors: dict[str, Tensor] = {}
    for file, header in headers.items():
        kinds: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # layers repeat: keep one object of each kind
        for name, spec in header.tensors.items():
            kind = spec.dtype, spec.shape
            tensors[name] = kinds.setdefault(kind, Tensor(*kind, file))
    return Inventory(tensors)


def duplicates(headers: Mapping[str, Header]) -> Iterator[Defect]:
    """Find tensors that two files hold: which one an engine keeps is an accident."""
    where: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if where.setdefault(name, file) != file:
                yield Defect(
                    Code.DUPLICATE_TENSOR,
                    f"tensor {name} is in {where[name]} and in {file}: remove the files of an earlier write, "
                    "and write an index",
                )
