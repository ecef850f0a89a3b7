"""The names of checkpoint folders of trainers without refitd's SDK, and how those say that one is complete. Pure.

    weight_v000012/       slime, miles   complete when model.safetensors.index.json is there: it is written last
    step_12/              prime-rl       complete when the empty file STABLE is there
    checkpoint-12/FULL/   grail          complete when READY-* is there, in the folder above
    global_step12_hf/     openrlhf       no marker: as of transformers, whose save_pretrained writes it
    checkpoint-12/        transformers   no marker: complete when headers, index and files agree and nothing changes
    weight_update_v12/    areal          no marker in the folder; its name-resolve record is another matter

The number is the step; the folder around it is the run. The operator chooses which of them count (`--trainers`): a
trainer's output folder may hold checkpoints that were never meant for engines. Such a folder stays the trainer's own:
the trainer may write it again after a restart and delete it at any time; refitd deletes it only if that was asked for.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from refitd_client.contract.naming import INDEX_NAME, MAX_STEP, parse_version_folder


class Trainer(StrEnum):
    """The trainers whose folders refitd can look for, beside its own."""

    SLIME = "slime"
    MILES = "miles"
    PRIME_RL = "prime-rl"
    GRAIL = "grail"
    OPENRLHF = "openrlhf"
    TRANSFORMERS = "transformers"
    AREAL = "areal"


@dataclass(frozen=True, slots=True)
class Marker:
    """The file that a trainer writes last, as a pattern. `above`: it lies in the folder above the checkpoint's."""

    pattern: str
    writer: str
    above: bool = False

    def is_among(self, names: Collection[str]) -> bool:
        """Whether the file is among `names`."""
        return any(fnmatchcase(name, self.pattern) for name in names)

    @property
    def awaited(self) -> str:
        """A sentence that says what is waited for."""
        return f"{self.writer} writes {self.pattern} last, and it is not there yet (or announce the folder)"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """What the path of a trainer's own folder says. `marker` is None if no file says that it is complete."""

    run: str
    step: int
    marker: Marker | None


@dataclass(frozen=True, slots=True)
class _Convention:
    trainers: frozenset[Trainer]
    folder: re.Pattern[str]
    inner: str | None = None
    marker: Marker | None = None


_NUMBER = r"(0|[1-9]\d{0,12})"  # one name for each step: "step_007" is no name of prime-rl's
_CONVENTIONS = (
    _Convention(
        frozenset({Trainer.SLIME, Trainer.MILES}),
        re.compile(r"weight_v(\d{6}|[1-9]\d{6,12})"),
        marker=Marker(INDEX_NAME, "slime"),
    ),
    _Convention(frozenset({Trainer.PRIME_RL}), re.compile(rf"step_{_NUMBER}"), marker=Marker("STABLE", "prime-rl")),
    _Convention(
        frozenset({Trainer.GRAIL}),
        re.compile(rf"checkpoint-{_NUMBER}"),
        inner="FULL",
        marker=Marker("READY-*", "grail", above=True),
    ),
    _Convention(frozenset({Trainer.OPENRLHF}), re.compile(rf"global_step{_NUMBER}_hf")),
    _Convention(frozenset({Trainer.TRANSFORMERS}), re.compile(rf"checkpoint-{_NUMBER}")),
    _Convention(frozenset({Trainer.AREAL}), re.compile(rf"weight_update_v{_NUMBER}")),
)


def recognise(path: str, trainers: Collection[Trainer] = tuple(Trainer)) -> ForeignCheckpoint | None:
    """The run and step in the last parts of a path beneath the root; None if it is no folder of these trainers'."""
    parts = path.split("/")
    for convention in _CONVENTIONS:
        if convention.trainers.isdisjoint(trainers) or (convention.inner or parts[-1]) != parts[-1]:
            continue
        *run, name = parts if convention.inner is None else parts[:-1] or [""]
        match = convention.folder.fullmatch(name)
        if match is not None and run and int(match[1]) <= MAX_STEP:
            return ForeignCheckpoint("/".join(run), int(match[1]), convention.marker)
    return None


def inner_folders(path: str, trainers: Collection[Trainer]) -> list[str]:
    """The folders in which the checkpoint of a folder may lie: itself, or one of a fixed name in it."""
    inner = [f"{path}/{each.inner}" for each in _CONVENTIONS if each.inner is not None]
    return [each for each in (*inner, path) if recognise(each, trainers) is not None]


def holds_checkpoint(foreign: ForeignCheckpoint, names: Collection[str]) -> bool:
    """Whether the folder is one by its content: a part of a run's name may look like a checkpoint's folder."""
    marked = foreign.marker is not None and foreign.marker.is_among(names)
    return marked or any(name.endswith(".safetensors") for name in names)


def is_foreign(path: str) -> bool:
    """Whether a version's folder is its trainer's own: its name is not one that refitd gives."""
    return parse_version_folder(path.rpartition("/")[2]) is None
