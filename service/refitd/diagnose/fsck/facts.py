"""What is compared: what the journal says, what lies on disk, what the engines say. Observations only, no verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from refitd.catalog.files import Unreadable
from refitd.engine.port import Reached, Unreached
from refitd.root.leftovers import Incoming, Slot
from refitd.root.scan import Listing, ListingFailed
from refitd.state.copy import Copy
from refitd.state.journal.condition import Condition, Sound
from refitd.state.records import AttemptRecord, EngineRecord, RolloutRecord
from refitd.state.version import VersionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFacts:
    """The journal. `last_folder` is the state folder that the root names, `elsewhere` whether a journal lies there.

    `versions` are all, also the deleted; `fingerprints` map (version, configuration) to what a clean load gave.
    """

    path: Path
    condition: Condition
    last_folder: Path | None = None
    elsewhere: bool = False
    versions: Mapping[str, VersionRecord] = field(default_factory=dict[str, VersionRecord])
    engines: Mapping[str, EngineRecord] = field(default_factory=dict[str, EngineRecord])
    open_attempts: Sequence[AttemptRecord] = ()
    fingerprints: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    rollouts: Sequence[RolloutRecord] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it knows who reads what: nothing is deleted by a journal that does not."""
        return isinstance(self.condition, Sound) and self.condition.origin.rebuilt


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Something under the root that refitd never touches: its path and what it is."""

    path: str
    noun: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFacts:
    """A copy that deltas are applied to. `odd` (only with --deep) is why its contents are not those that it says."""

    copy: Copy
    odd: str | Unreadable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The root. `signatures` and `digests` (only with --deep) are by path; None where nothing is there."""

    listing: Listing | ListingFailed
    signatures: Mapping[str, str | Unreadable | None] = field(default_factory=dict[str, str | Unreadable | None])
    digests: Mapping[str, str | Unreadable] = field(default_factory=dict[str, str | Unreadable])
    incoming: Sequence[Incoming] = ()
    trash: Sequence[str] = ()
    slots: Sequence[Slot] = ()
    copies: Sequence[CopyFacts] = ()
    foreign: Sequence[Foreign] = ()
    unlisted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine. `root` is where it sees the root.

    `generates` is False while it is paused, None where it does not say. `fingerprint` is None where it was not asked
    or cannot tell.
    """

    id: str
    url: str
    root: str
    seen: Reached | Unreached
    fingerprint: str | None = None
    generates: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything. `engines` is None where they were not asked; `running` is the service that runs on the root now."""

    journal: JournalFacts
    disk: DiskFacts
    engines: Sequence[EngineFacts] | None = None
    running: str | None = None
