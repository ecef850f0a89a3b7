"""How an engine gets at a version's files."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from refitd.state.version import VersionRecord


class SeenPath(Protocol):
    """A version's path as the engine sees it, None for a delta that it does not take in place and no copy holds now."""

    def __call__(self, version: VersionRecord, *, in_place: bool = False) -> str | None: ...


class Check(Protocol):
    """Whether the files that an engine is about to read, or has read, are those that were found good."""

    async def __call__(self, version: VersionRecord, *, in_place: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one engine: where it sees them, whether they are what was sealed (`check` marks the version LOST where they
    are not), and `warm`, which has them read into memory where they may not be.
    """

    seen_path: SeenPath
    check: Check
    warm: Callable[[VersionRecord], Awaitable[None]]
