"""What all ranks have to say alike, when they open their publishers and when they publish."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from refitd_client.errors import PublishError, StepConflictError
from refitd_client.http.publisher_client import root_name
from refitd_client.sharded.rank_group import Opening


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank opens its publisher with, as far as all ranks have to agree.

    Hosts may have mounted one folder at different places: `marks` of the root are alike wherever it is seen.
    """

    run: str
    root: str
    marks: frozenset[str]
    max_shard_bytes: int | None

    @classmethod
    def of(cls, root: str | os.PathLike[str], run: str, max_shard_bytes: int | None) -> Self:
        """Those of a rank that was given these arguments."""
        path = Path(root).absolute()
        return cls(run=run, root=str(path), marks=_marks(path), max_shard_bytes=max_shard_bytes)


def require_same_settings(ranks: Sequence[RankSettings]) -> None:
    """Hold what each rank was opened with against rank 0.

    Raises:
        PublishError: one was opened with something else.
    """
    first = ranks[0]
    for rank, settings in enumerate(ranks):
        for name in ("run", "root", "max_shard_bytes"):
            its, firsts = getattr(settings, name), getattr(first, name)
            if its != firsts and not (name == "root" and settings.marks & first.marks):
                raise PublishError(
                    f"rank {rank} was opened with {name}={its!r} and rank 0 with {firsts!r}: all ranks are opened with "
                    f"{'one folder' if name == 'root' else 'the same'}"
                )


def require_alike(rank: int, opening: Opening, first: Opening) -> None:
    """Hold what a rank asks for against what rank 0 does.

    Raises:
        StepConflictError: it is at another step. PublishError: it asks for something else than rank 0.
    """
    if opening.step != first.step:
        raise StepConflictError(
            f"rank {rank} publishes step {opening.step} and rank 0 step {first.step}: all ranks publish the same step"
        )
    for name in ("transport", "durable", "delta_rules"):
        mine, its = getattr(opening, name), getattr(first, name)
        if mine != its:
            raise PublishError(
                f"rank {rank} asks for {name}={mine!r} and rank 0 for {its!r}: all ranks ask for the same"
            )


def _marks(root: Path) -> frozenset[str]:
    """What a folder is recognised by under another path: its number in its file system, and its root's name if it has
    one; nothing where it is not there yet.
    """
    try:
        number = root.stat().st_ino
    except OSError:
        return frozenset()
    name = root_name(root)
    return frozenset({str(number), name} if name else {str(number)})
