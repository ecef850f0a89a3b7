"""Names: of runs, of versions on disk and of versions on the wire.

A version is (run, generation, step). Its directory is `v000123`, or `v000123.g2` from the second generation on;
its id is one URL-safe word made of both. Order is by (generation, step) and never by clocks.
"""

import operator
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex

MANIFEST_NAME = "refit.json"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_model.safetensors"  # a LoRA adapter's weights and configuration, as peft calls them
ADAPTER_CONFIG_NAME = "adapter_config.json"
DELTA_NAME = "weights.refit-delta"  # an ending that no engine takes for a checkpoint
INCOMING_PREFIX = ".incoming-"
STAGING_LOCK = ".lock"  # in a folder that is being written, or a slot that is being taken: held by its publisher
SERVICE_FOLDER = ".refitd"  # the service's own folder in the root
ROOT_NAME = "id"  # in it: the root's own name, which the service's journal knows
TRASH = "trash"  # in it: what is deleted, from the rename on until it is gone

MAX_RUN_LENGTH = 200
MAX_STEP = 10**12

# At most as many digits as MAX_STEP has: Python refuses to read a number of 4,301, by a ValueError.
_VERSION = re.compile(r"v(\d{6,13})(?:\.g([1-9]\d{0,8}))?")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEPARATOR = "~"  # in no run name, and unreserved in URLs (RFC 3986, 2.3)


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
    """Return `run` if it is a safe relative name such as `experiment/trial`.

    Raises:
        NameRefusedError: it is empty, too long, absolute, leaves its folder, or looks like a version.
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
    """A trainer's step, which may be an integer of NumPy's, as an int.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step is {step!r}: it is a whole number") from None


def check_step(step: int) -> int:
    """Return `step` if it is one that a version can have.

    Raises:
        NameRefusedError: it is negative or absurdly large.
    """
    if not 0 <= step <= MAX_STEP:
        raise InvalidNameError(f"step {step} is not between 0 and {MAX_STEP}")
    return step


def version_folder(order: Order) -> str:
    """The directory name of a version: `v000123`, `v000123.g2`."""
    suffix = "" if order.generation == 1 else f".g{order.generation}"
    return f"v{order.step:06d}{suffix}"


def parse_version_folder(name: str) -> Order | None:
    """The inverse of `version_folder`; None if the name is not one that it makes."""
    match = _VERSION.fullmatch(name)
    if match is None:
        return None
    order = Order(generation=int(match[2] or 1), step=int(match[1]))
    return order if version_folder(order) == name else None


@lru_cache(2**16)
def version_id(run: str, order: Order) -> str:
    """The id of a version on the wire. Clients treat it as opaque."""
    return _SEPARATOR.join([*run.split("/"), version_folder(order)])


def parse_version_id(id_: str) -> tuple[str, Order] | None:
    """The inverse of `version_id`: the run and the order; None if the id is not one that it makes."""
    *run, folder = id_.split(_SEPARATOR)
    order = parse_version_folder(folder)
    return None if order is None or not run else ("/".join(run), order)
