"""How trainers without refitd's SDK call a checkpoint's folder, and how they say that it is complete. Pure.

    weight_v000012/       slime, miles   complete when model.safetensors.index.json is there: it is written last
    step_12/              prime-rl       complete when the empty file STABLE is there
    checkpoint-12/FULL/   grail          complete when READY-* is there, in the folder above
    checkpoint-12/        transformers   no marker: complete when headers, index and files agree and nothing changes
    weight_update_v12/    areal          no marker in the folder; its name-resolve record is another matter

The number is the step; the folder around it is the run. Which of them count is the operator's choice (`--trainers`): a
trainer's output folder may hold checkpoints that were never meant for engines. Such a folder stays the trainer's own:
it is written again after a restart, deleted when its trainer likes, and by refitd only where that was asked for.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from refitd_client.contract.naming import INDEX_NAME, MAX_STEP, parse_version_folder


class Trainer(StrEnum):
    """Whose folders can be looked for, beside refitd's own."""

    SLIME = "slime"
    MILES = "miles"
    PRIME_RL = "prime-rl"
    GRAIL = "grail"
    TRANSFORMERS = "transformers"
    AREAL = "areal"


@dataclass(frozen=True, slots=True)
class Marker:
    """The file that a trainer writes last, as a pattern. `above`: it lies in the folder above the checkpoint's."""

    pattern: str
    writer: str
    above: bool = False

    def is_among(self, names: Collection[str]) -> bool:
        """Whether it is there."""
        return any(fnmatchcase(name, self.pattern) for name in names)

    @property
    def awaited(self) -> str:
        """What is waited for, as a sentence."""
        return f"{self.writer} writes {self.pattern} last, and it is not there yet (or announce the folder)"


@dataclass(frozen=True, slots=True)
class Foreign:
    """What the path of a trainer's own folder says. `marker` None: nothing tells when it is complete."""

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
    _Convention(frozenset({Trainer.TRANSFORMERS}), re.compile(rf"checkpoint-{_NUMBER}")),
    _Convention(frozenset({Trainer.AREAL}), re.compile(rf"weight_update_v{_NUMBER}")),
)


def recognise(path: str, trainers: Collection[Trainer] = tuple(Trainer)) -> Foreign | None:
    """What a path beneath the root says by its last parts; None where it is no folder of these trainers'."""
    parts = path.split("/")
    for convention in _CONVENTIONS:
        if convention.trainers.isdisjoint(trainers) or (convention.inner or parts[-1]) != parts[-1]:
            continue
        *run, name = parts if convention.inner is None else parts[:-1] or [""]
        match = convention.folder.fullmatch(name)
        if match is not None and run and int(match[1]) <= MAX_STEP:
            return Foreign("/".join(run), int(match[1]), convention.marker)
    return None


def inner_folders(path: str, trainers: Collection[Trainer]) -> list[str]:
    """Where the checkpoint may lie in a folder of this path: there itself, or in a folder of a set name."""
    inner = [f"{path}/{each.inner}" for each in _CONVENTIONS if each.inner is not None]
    return [each for each in (*inner, path) if recognise(each, trainers) is not None]


def holds_checkpoint(foreign: Foreign, names: Collection[str]) -> bool:
    """Whether something in the folder says that it is one: a part of a run's name may be called like a checkpoint."""
    marked = foreign.marker is not None and foreign.marker.is_among(names)
    return marked or any(name.endswith(".safetensors") for name in names)


def is_foreign(path: str) -> bool:
    """Whether a version's folder is its trainer's own: it has another name than refitd gives."""
    return parse_version_folder(path.rpartition("/")[2]) is None
