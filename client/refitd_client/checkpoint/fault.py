"""What can be wrong with a checkpoint: a code for programs and a sentence for people.

A checkpoint is rejected for a fault that proves it bad. After one that does not (`changed`, `unreadable`) it is
validated again.
"""

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """Why a checkpoint is not valid, or (`changed`, `unreadable`) why that is not known yet."""

    TORN_FILE = "torn-file"  # shorter than its header says
    MISSING_FILE = "missing-file"  # named by the index or the manifest, and not there
    BAD_HEADER = "bad-header"
    BAD_INDEX = "bad-index"
    BAD_MANIFEST = "bad-manifest"
    MANIFEST_MISMATCH = "manifest-mismatch"
    INDEX_MISMATCH = "index-mismatch"
    DUPLICATE_TENSOR = "duplicate-tensor"
    TWO_SAVES = "two-saves"  # in one folder: which one was meant is not known
    MISSING_TENSOR = "missing-tensor"
    EXTRA_TENSOR = "extra-tensor"
    WRONG_SHAPE = "wrong-shape"
    WRONG_DTYPE = "wrong-dtype"
    NON_FINITE = "non-finite"
    NO_COPY = "no-copy"  # an output layer that differs from the embedding to which the engines' model ties it
    PICKLE = "pickle"  # *.bin and *.pt run code when they are loaded
    NO_WEIGHTS = "no-weights"
    NOT_REGULAR = "not-regular"  # a link, FIFO, device or folder where a file belongs, or a path out of the root
    NO_REFERENCE = "no-reference"
    OLD_GENERATION = "old-generation"  # it is not known whether it was meant to be of the current one
    UNSUPPORTED_KIND = "unsupported-kind"
    BAD_DELTA = "bad-delta"
    WRONG_BASE = "wrong-base"  # the base of a delta is gone, bad, or not what the delta leads from
    OUT_OF_MEMORY = "out-of-memory"  # the service could not get the memory that validating it takes
    SET_ASIDE = "set-aside"  # the service died while it validated it, more than once
    CHANGED = "changed"  # while it was read
    UNREADABLE = "unreadable"

    @property
    def is_proof(self) -> bool:
        """Whether it proves the checkpoint bad. One that changes or cannot be read is validated again."""
        return self not in {Code.CHANGED, Code.UNREADABLE}


AGAIN_WHEN_ANNOUNCED = frozenset({Code.OUT_OF_MEMORY, Code.SET_ASIDE})
"""Faults of the service more than of the version: announced once more, it is validated once more."""

FOR_EVERY_NOTICE = frozenset({Code.NON_FINITE})
"""Faults of the bytes alone: a notice of the same files, whatever it allows, leads to the same verdict."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is wrong. `reason` is a sentence that names the file or tensor and says what to do."""

    code: Code
    reason: str


def shown(name: str) -> str:
    """A file's name as text for a sentence, a journal and JSON: a name on disk may be any bytes."""
    return name if name.isprintable() else ascii(name)
