"""Names: of runs, of versions on disk and on the wire, of tensors, and of slots.

A version is (run, generation, step). Its directory is `v000123`, or `v000123.g2` from the second generation on;
its id is one URL-safe word made of both. Order is by (generation, step) and never by clocks.

Slots: the files of a version that is not needed any more, for a publisher to write the next one into.

    <root>/.refitd/slots/<exp~trial>/<layout>-<unique>/     model-0000i-of-0000N.safetensors, and nothing else

Both sides keep to these rules, so that neither has to ask the other:

    A slot's bytes mean nothing. Only its files' names and sizes and the pages that they lie on are of use; a publisher
    that takes it writes every byte anew. So a slot that was only half overwritten cannot be published by mistake.
    It holds no manifest, and its folder has no name that could be a version's. Both were made durable before it got its
    name here: no power cut puts an old manifest on new bytes.
    Its files have one name each. A file with a second hard link is used elsewhere as well.
    Taking it is a rename, by the service as by the publisher: the second one finds nothing.
    Its files never change their length: a reader that has one mapped would be killed.

`layout` is a digest of the shards' names, sizes and headers: of the names, dtypes, shapes and order of the tensors.
"""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import SupportsIndex, cast

import xxhash

MANIFEST_NAME = "refit.json"
MODEL_NAME = "model.safetensors"  # of a model in one file, as transformers call it
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"  # a LoRA adapter's weights and configuration, as peft calls them
ADAPTER_CONFIG_NAME = "adapter_config.json"
DELTA_NAME = "weights.refit-delta"  # an ending that no engine takes for a checkpoint
INCOMING_PREFIX = ".incoming-"
_STAGING = re.compile(re.escape(INCOMING_PREFIX) + "(?:(v[^-]+)-)?[0-9a-f]{32}")
STAGING_LOCK = ".lock"  # in a folder that is being written, or a slot that is being taken: held by its publisher
STAGING_PROGRESS = ".progress"  # in a slot that several ranks write: how far each is (`sharded/rank_progress.py`)
SERVICE_FOLDER = ".refitd"  # the service's own folder in the root
DURABLE_KEY = "durable"  # in the metadata of a version that has no files where all engines take it: why, as a policy
ROOT_NAME = "id"  # in it: the root's own name, which the service's journal knows
TRASH = "trash"  # in it: what is deleted, from the rename on until it is gone

MAX_RUN_LENGTH = 200
MAX_STEP = 10**12

# At most as many digits as MAX_STEP has: Python refuses to read a number of 4,301, by a ValueError.
_VERSION = re.compile(r"v(\d{6,13})(?:\.g([1-9]\d{0,8}))?")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEPARATOR = "~"  # in no run name, and unreserved in URLs (RFC 3986, 2.3)
_MAX_TENSOR_NAME = 1024  # characters
NO_NAME = f"empty, longer than {_MAX_TENSOR_NAME} or not printable"
"""What a tensor's name is that `is_tensor_name` refuses."""


def is_tensor_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_TENSOR_NAME and name.isprintable()


MAX_PATTERNS = 64  # of names that a version may lack


def name_patterns(patterns: object) -> tuple[str, ...]:
    """Patterns of the names of tensors, such as `mtp.*`, as shells have them.

    Raises:
        TypeError: they are no list of texts.
        ValueError: one cannot be a pattern of names, or they are too many.
    """
    if isinstance(patterns, str | bytes | bool) or not isinstance(patterns, Iterable):
        raise TypeError(f"allow_missing is {patterns!r}: it takes patterns of names, such as ['mtp.*']")
    found = tuple(cast("Iterable[object]", patterns))
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"allow_missing has {pattern!r}: it takes patterns of names, such as ['mtp.*']")
        if not is_tensor_name(pattern) or not any(map(str.isalnum, pattern)):
            raise ValueError(f"allow_missing has the pattern {pattern[:100]!a}, which does not say what may be missing")
    if len(found) > MAX_PATTERNS:
        raise ValueError(f"allow_missing has {len(found)} patterns, and at most {MAX_PATTERNS} are taken")
    return cast("tuple[str, ...]", found)


class InvalidNameError(ValueError):
    """A run or version name that could leave its folder or be mistaken for something else."""


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """A version's place in its run. Newest wins: by generation, then by step.

    A new generation begins when a trainer restarts at a step that it had published before.
    """

    generation: int
    step: int


def check_run(run: str) -> str:
    """Return `run` if it is a safe relative name such as `experiment/trial`. Raises InvalidNameError if it is empty,
    too long, absolute, leaves its folder, or looks like a version.
    """
    segments = run.split("/")
    if len(run) > MAX_RUN_LENGTH:
        raise InvalidNameError(f"run name is longer than {MAX_RUN_LENGTH} characters")
    for segment in segments:
        if not _SEGMENT.fullmatch(segment):
            raise InvalidNameError(
                f"run {run!r} is not a safe relative name: use letters, digits, '.', '_' and '-', "
                "parts joined by '/', no part beginning with a dot"
            )
        if _VERSION.fullmatch(segment):
            raise InvalidNameError(f"run {run!r} has a part that looks like a version directory ({segment})")
    return run


def whole_step(step: SupportsIndex) -> int:
    """A trainer's step, which may be an integer of NumPy's, as an int. Raises TypeError if it is no integer."""
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step is {step!r}: it is a whole number") from None


def check_step(step: int) -> int:
    """Return `step` if a version can have it. Raises InvalidNameError if it is negative or absurdly large."""
    if not 0 <= step <= MAX_STEP:
        raise InvalidNameError(f"step {step} is not between 0 and {MAX_STEP}")
    return step


def version_folder(order: Order) -> str:
    """The directory name of a version: `v000123`, `v000123.g2`."""
    suffix = "" if order.generation == 1 else f".g{order.generation}"
    return f"v{order.step:06d}{suffix}"


def parse_version_folder(name: str) -> Order | None:
    match = _VERSION.fullmatch(name)
    if match is None:
        return None
    order = Order(generation=int(match[2] or 1), step=int(match[1]))
    return order if version_folder(order) == name else None


def version_label(order: Order) -> str:
    """The label (`weight_version`) that engines get with a version: `123`, `123.g2` from the second generation on.

    A trainer that begins again at an earlier step does steps again: the step alone would name two versions.
    """
    return str(order.step) if order.generation == 1 else f"{order.step}.g{order.generation}"


def parse_version_label(label: str) -> Order | None:
    """The inverse of `version_label`; None for a label that it does not make, such as a server's own."""
    step, _, generation = label.partition(".g")
    order = parse_version_folder(f"v{step:0>6}" + (f".g{generation}" if generation else ""))
    return order if order is not None and version_label(order) == label else None


@lru_cache(2**16)
def version_id(run: str, order: Order) -> str:
    """The id of a version on the wire. Clients treat it as opaque."""
    return _SEPARATOR.join([*run.split("/"), version_folder(order)])


def parse_version_id(id_: str) -> tuple[str, Order] | None:
    """The inverse of `version_id`: the run and the order; None if the id is not one that it makes."""
    *run, folder = id_.split(_SEPARATOR)
    order = parse_version_folder(folder)
    return None if order is None or not run else ("/".join(run), order)


def label_of(id_: str) -> str:
    """The label that engines get with the version of this id. Raises InvalidNameError if it is no version's id."""
    parsed = parse_version_id(id_)
    if parsed is None:
        raise InvalidNameError(f"{id_!r} is no version's id")
    return version_label(parsed[1])


SLOTS = "slots"
_SLOT = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """A shard without its tensors' bytes: its name, the bytes before the tensors, and its size in bytes."""

    name: str
    header: bytes
    size: int


def layout_of(shards: Iterable[ShardLayout]) -> str:
    """The layout of a version: 32 hex digits, equal for versions that fit into each other's files."""
    hasher = xxhash.xxh3_128()
    for shard in sorted(shards, key=lambda shard: shard.name):
        hasher.update(f"{shard.name}\0{shard.size}\0{xxhash.xxh3_128(shard.header).hexdigest()}\n".encode())
    return hasher.hexdigest()


def run_slots(run: str) -> str:
    """The name of the folder that holds a run's slots."""
    return run.replace("/", _SEPARATOR)


def run_of_slots(name: str) -> str:
    return name.replace(_SEPARATOR, "/")


def slots_path(run: str) -> str:
    return f"{SERVICE_FOLDER}/{SLOTS}/{run_slots(run)}"


def slot_name(layout: str, unique: str) -> str:
    return f"{layout}-{unique}"


def layout_in(name: str) -> str | None:
    match = _SLOT.fullmatch(name)
    return None if match is None else match[1]


@cache
def installed_release() -> str:
    """The release of refitd that runs; "unknown" where it runs from its source without being installed."""
    from importlib.metadata import PackageNotFoundError, version  # 30 ms, which most commands do without

    try:
        return version("refitd")
    except PackageNotFoundError:
        return "unknown"


def pull_folder(order: Order, digest: str) -> str:
    """The name of the folder that a version is pulled into; `digest` is that of its manifest."""
    return f"{INCOMING_PREFIX}{version_folder(order)}-{digest.rpartition(':')[2]}"


def pulled_into(name: str) -> Order | None:
    """The order of the version that is pulled into a folder of this name; None where it is no such name."""
    found = _STAGING.fullmatch(name)
    return None if found is None or found[1] is None else parse_version_folder(found[1])


def is_staging(name: str) -> bool:
    """Whether a folder of this name is one in which a publisher writes a version."""
    return _STAGING.fullmatch(name) is not None
