"""Which files of a folder a loader would read, and whether the index tells the truth about them. Pure.

As SGLang 0.5 and transformers do: with `model.safetensors.index.json` the files that it names, without it every
`*.safetensors`. Where there is none of these they turn to `*.bin` and `*.pt`; those are pickles, which run
code when they are loaded, and are never given to an engine.

Every version of a run repeats the layout of the one before. `read_header` and `parse_index` return the same objects for
the same bytes, and what follows from them alone is kept: for a model of 100,000 tensors it takes a second.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from itertools import islice

import msgspec

from refitd_client.checkpoint.fault import Code, Defect, shown
from refitd_client.checkpoint.header import (
    MAX_TENSORS,
    STRINGS,
    BoundedCache,
    Header,
    PairsRefusedError,
    pairs,
    text,
)
from refitd_client.checkpoint.inventory import Inventory, duplicates, inventory_of
from refitd_client.contract.decoding import from_json
from refitd_client.contract.manifest import TensorsSummary
from refitd_client.contract.naming import INDEX_NAME

MAX_INDEX_BYTES = 64 * 2**20
_REMEMBERED_INDEXES = 64  # indexes: those of the runs' layouts, which every version repeats
_INDEXES_BYTES = 32 * 2**20  # of their text; parsed they take about twice as much
SAFETENSORS = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERED = re.compile(r"(.*)-(\d{5,7})-of-(\d{5,7})\.safetensors", re.DOTALL)
_OF_A_MODEL = re.compile(r"((?:pytorch_)?model)(?:-\d{5,7}-of-(\d{5,7}))?(\.safetensors|\.bin)")
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*")  # what a Trainer leaves


class IndexRefusedError(ValueError):
    """An index that cannot be followed. The message is a sentence about "it", the index."""


class IndexOfDeltaError(IndexRefusedError):
    """An index over changes against another checkpoint, which no engine can load."""


@dataclass(frozen=True, slots=True)
class Index:
    """`weight_map` of an index: tensor name → file name."""

    file_of: Mapping[str, str]

    @property
    def files(self) -> list[str]:
        return sorted(set(self.file_of.values()))


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files that a loader would read, as far as they are there, and what is wrong with them."""

    weights: tuple[str, ...]
    faults: tuple[Defect, ...]


_parsed: BoundedCache[bytes, Index] = BoundedCache(_REMEMBERED_INDEXES, _INDEXES_BYTES)


class _Document(msgspec.Struct):
    weight_map: msgspec.Raw
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


class _Metadata(msgspec.Struct):
    delta_encoding: str | None = None


def parse_index(data: bytes) -> Index:
    """Parse an index of any origin.

    Raises:
        IndexOfDeltaError: it says that the files are slime's delta of another checkpoint.
        IndexRefusedError: it is too large, no JSON object with a `weight_map`, has a tensor twice, or names a file
            that is not a plain `*.safetensors` of its own folder.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise IndexRefusedError(f"it is larger than {MAX_INDEX_BYTES} bytes")
    key = sha256(data).digest()
    index = _parsed.get(key)
    if index is None:  # one that was refused is parsed, and refused, each time
        index = _parse(data)
        _parsed.put(key, index, len(data))
    return index


def _parse(data: bytes) -> Index:
    try:
        document = from_json(data, _Document)
        if _says_delta(bytes(document.metadata)):
            raise IndexOfDeltaError(
                "it says delta_encoding, and engines load full checkpoints: have the trainer write those, or publish "
                "its deltas by the hook refitd_client.trainers.slime"
            )
        return Index(_file_of(bytes(document.weight_map)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, PairsRefusedError) as error:
        raise IndexRefusedError(f"it does not parse: {error}") from error


def _says_delta(metadata: bytes) -> bool:
    try:
        return from_json(metadata, _Metadata).delta_encoding is not None
    except msgspec.ValidationError:
        return False  # a trainer may write anything there


def _file_of(weight_map: bytes) -> dict[str, str]:
    file_of: dict[str, str] = {}
    files: dict[str, str] = {}  # one string of each, instead of one for each tensor
    for tensor, string in pairs(weight_map, STRINGS):
        if tensor in file_of:
            raise IndexRefusedError(f"it has tensor {tensor[:200]!a} twice")
        if len(file_of) == MAX_TENSORS:
            raise IndexRefusedError(f"it has more than {MAX_TENSORS} tensors")
        file = text(string)
        file_of[tensor] = files.setdefault(file, file)
    for file in files:
        if not file.endswith(SAFETENSORS) or "/" in file or file.startswith(".") or not file.isprintable():
            raise IndexRefusedError(f"it names a file {file[:200]!a}; it may only name *.safetensors beside it")
    return file_of


def lay_out(names: Collection[str], index: Index | None) -> WeightFiles:
    """Choose the weight files among the names in a folder (without hidden ones)."""
    weights = index.files if index is not None else _without_index(names)
    here = tuple(name for name in weights if name in names)
    faults = [
        Defect(
            Code.MISSING_FILE,
            f"{name} is named by {INDEX_NAME} and is not in the folder: put it there, or save all of it again",
        )
        for name in weights
        if name not in names
    ]
    faults += [
        Defect(Code.BAD_HEADER, f"{shown(name)} has a name that cannot be printed: rename it")
        for name in here
        if not name.isprintable()
    ]
    if index is None:
        faults += _gaps(here)
    if not faults and not here:
        faults.append(_nothing(names))
    return WeightFiles(here, tuple(faults))


def _gaps(names: Collection[str]) -> Iterator[Defect]:
    """Shards that are numbered "1 of 4" and not all there: without this, the first of four would look complete."""
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        stem, total = match[1], match[3]
        if int(match[2]) == 1 and int(total) <= MAX_TENSORS:
            expected = (f"{stem}-{number:0{len(total)}d}-of-{total}.safetensors" for number in range(1, int(total) + 1))
            if (late := next((name for name in expected if name not in names), None)) is not None:
                yield Defect(Code.MISSING_FILE, f"{late} is not in the folder, and its name says that it belongs there")


def _without_index(names: Collection[str]) -> list[str]:
    weights = sorted(name for name in names if name.endswith(SAFETENSORS))
    both = len(weights) == 2 and weights[0].endswith("consolidated.safetensors")
    if both and weights[1].endswith("model.safetensors"):  # as Mistral publishes: the same twice, and loaders read one
        return weights[1:]
    return weights


def read_elsewhere(names: Iterable[str], layout: WeightFiles) -> Iterator[Defect]:
    """Where one engine reads other files of a folder than another: vLLM (0.32) takes `consolidated*.safetensors`, in
    which Mistral's models lie a second time, for all that counts.
    """
    for name in sorted(names):
        if fnmatchcase(name, "consolidated*.safetensors") and name not in layout.weights and layout.weights:
            text = (
                f"vLLM reads {shown(name)}, SGLang reads {layout.weights[0]}, and only the latter is checked: remove "
            )
            yield Defect(Code.TWO_SAVES, f"{text}{shown(name)}, or publish the folder with refitd's publisher")
            return


@dataclass(frozen=True, slots=True)
class _Save:
    """The files of one save of a model, of `total` that it has when it is whole. `time` is that of the newest."""

    name: str
    files: frozenset[str]
    time: int
    total: int

    @property
    def is_whole(self) -> bool:
        return len(self.files) == self.total

    @property
    def is_pickle(self) -> bool:
        return not self.name.endswith((SAFETENSORS, INDEX_NAME))

    def __str__(self) -> str:
        return f"{self.name} ({datetime.fromtimestamp(self.time // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC)"


def two_saves(times: Mapping[str, int], index: Index | None) -> Defect | None:
    """What is wrong with a folder that a model was saved to more than once, under other names each time.

    Engines read what the index names, whichever save is newer. A copy of a folder changes the times of its files, so a
    second whole save is a fault also where it looks older. A pickle is one if it is newer: on hubs the same model lies
    in both forms.

    `times` say when the files were changed last, in nanoseconds.
    """
    saves = [each for each in _saves(times) if index is None or each.files.isdisjoint(index.files)]
    rivals = [each for each in saves if each.is_whole and not each.is_pickle]
    if index is not None:
        here = times.keys() & index.files
        read = _Save(INDEX_NAME, frozenset(here), max(times.get(name, 0) for name in (INDEX_NAME, *here)), len(here))
        if saves and not here:
            newest = max(saves, key=lambda each: each.time)
            which = "an earlier" if newest.time > read.time else "another"
            text = f"{read} is of {which} save than {newest}: none of the files that it names is in the folder, and "
            return Defect(Code.TWO_SAVES, f"{text}engines look for those. Remove the index")
        rivals += [each for each in saves if not each.is_whole and not each.is_pickle and each.time > read.time]
    elif rivals:
        read = rivals.pop(0)
    else:
        return None
    rivals += [each for each in saves if each.is_whole and each.is_pickle and each.time > read.time]
    if not rivals:
        return None
    text = (
        f"it holds two saves, {read} and {rivals[0]}, and it is not known which one is meant (engines would read the "
    )
    return Defect(
        Code.TWO_SAVES, f"{text}{'first' if index or rivals[0].is_pickle else 'two mixed'}): remove the other"
    )


def _saves(times: Mapping[str, int]) -> list[_Save]:
    found: dict[tuple[str, int], list[str]] = {}
    for match in filter(None, map(_OF_A_MODEL.fullmatch, sorted(times))):
        stem, total, ending = match.groups()
        name = f"{stem}{ending}" if total is None else f"{stem}-*-of-{total}{ending}"
        found.setdefault((name, int(total or 1)), []).append(match[0])
    return [
        _Save(name, frozenset(files), max(map(times.__getitem__, files)), total)
        for (name, total), files in found.items()
    ]


def _nothing(names: Collection[str]) -> Defect:
    for name in sorted(names):
        if name.endswith(PICKLES) and not _matches(name, _NOT_WEIGHTS):
            return Defect(
                Code.PICKLE,
                f"{shown(name)} is a pickle, which can run code when it is loaded, and there is no safetensors file: "
                "save the checkpoint as safetensors (save_pretrained does by default)",
            )
    return Defect(
        Code.NO_WEIGHTS, "there is no *.safetensors file in the folder: save the checkpoint there, as safetensors"
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_index(index: Index, tensors_of: Mapping[str, Collection[str]]) -> Iterator[Defect]:
    """How the index and the headers, given as file name → tensor names, differ."""
    for tensor, file in index.file_of.items():
        if file in tensors_of and tensor not in tensors_of[file]:
            yield _disagree(f"tensor {tensor[:200]!r} is not in {file}, where {INDEX_NAME} has it")
    for file, tensors in tensors_of.items():
        for tensor in tensors:
            if index.file_of.get(tensor) != file:
                yield _disagree(f"tensor {tensor!r} is in {file}, and {INDEX_NAME} does not say so")


def _disagree(what: str) -> Defect:
    return Defect(Code.INDEX_MISMATCH, f"{what}: write the index after the shards, from what they hold")


MOST_OF_A_KIND = 3  # faults: one tensor in the wrong place often means all of them
_REMEMBERED_LAYOUTS = 16  # layouts: of each a service needs one for a run's full versions
_REMEMBERED_TENSORS = 500_000  # in all of them; one takes up to 200 bytes


@dataclass(frozen=True)
class CheckpointLayout:
    """The headers of a checkpoint's weight files, and its index where it has one."""

    headers: Mapping[str, Header]
    index: Index | None

    @cached_property
    def inventory(self) -> Inventory:
        return inventory_of(self.headers)

    @cached_property
    def summary(self) -> TensorsSummary:
        specs = (spec for header in self.headers.values() for spec in header.tensors.values())
        return TensorsSummary.of((spec.dtype, spec.end - spec.start) for spec in specs)

    @cached_property
    def duplicates(self) -> list[Defect]:
        """Tensors that two files hold, the first few."""
        return list(islice(duplicates(self.headers), MOST_OF_A_KIND))

    @cached_property
    def disagreements(self) -> list[Defect]:
        """How the index and the headers differ, the first few."""
        named = {name: header.tensors for name, header in self.headers.items()}
        return [] if self.index is None else list(islice(check_index(self.index, named), MOST_OF_A_KIND))

    def is_of(self, headers: Mapping[str, Header], index: Index | None) -> bool:
        same_names = list(self.headers) == list(headers)
        return same_names and self.index is index and all(self.headers[name] is headers[name] for name in headers)


_known: BoundedCache[tuple[object, ...], CheckpointLayout] = BoundedCache(_REMEMBERED_LAYOUTS, _REMEMBERED_TENSORS)


def layout_of(headers: Mapping[str, Header], index: Index | None) -> CheckpointLayout:
    """The layout of some headers and an index; the one that was worked out before, where these are the same objects."""
    key = id(index), *map(id, headers.values())
    known = _known.get(key)
    if known is None or not known.is_of(headers, index):  # an id alone may be another object's by now
        known = CheckpointLayout(dict(headers), index)
        _known.put(key, known, sum(len(header.tensors) for header in headers.values()))
    return known
