"""What a reply to a load means for the weights that an engine holds. Each adapter reads the replies of its servers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loaded:
    """It says that it has loaded everything. Where refitd inside it did, it says the version, the fingerprint of what
    it holds, and how it was loaded (docs/plugin.md).
    """

    version: str | None = None
    fingerprint: str | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class Untouched:
    """It refused before the first write, or was never called. `vouched`: refitd inside it says so, or has restored all.
    `needs_full` and `led` as in `Refit`.
    """

    reason: str
    reachable: bool = True
    vouched: bool = False
    needs_full: bool = False
    led: bool = False


@dataclass(frozen=True, slots=True)
class Unclear:
    """It is not known what it holds now; nor, where it may be `running`, whether the load has ended."""

    reason: str
    running: bool = False
