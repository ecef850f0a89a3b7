"""Slots: the files of a version that is not needed any more, for a publisher to write the next one into.

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

import re
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from refitd_client.contract.naming import SERVICE_FOLDER

SLOTS = "slots"
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})")
_SEPARATOR = "~"  # in no run's name


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
    """The inverse of `run_slots`."""
    return name.replace(_SEPARATOR, "/")


def slots_path(run: str) -> str:
    """The folder of a run's slots, relative to the root."""
    return f"{SERVICE_FOLDER}/{SLOTS}/{run_slots(run)}"


def slot_name(layout: str, unique: str) -> str:
    """The name of a slot; `unique` is 32 hex digits."""
    return f"{layout}-{unique}"


def layout_in(name: str) -> str | None:
    """The layout in a slot's name, None if it is no slot's name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]
