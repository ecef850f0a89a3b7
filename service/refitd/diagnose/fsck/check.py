"""The whole of fsck: gather, compare, and mend if asked to."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refitd.catalog.files import DiskFiles
from refitd.diagnose.fsck.compare import compare
from refitd.diagnose.fsck.disk import look_at_disk
from refitd.diagnose.fsck.facts import Facts
from refitd.diagnose.fsck.finding import Finding
from refitd.diagnose.fsck.held import still
from refitd.diagnose.fsck.journal_facts import read_journal
from refitd.diagnose.fsck.mend import mend
from refitd.diagnose.fsck.roster import Roster, roster_of
from refitd.diagnose.fsck.telling import Telling
from refitd.materialize.disk import DiskCopies
from refitd.root.mark import RootGuard
from refitd.root.ownership import StartRefusedError, owned
from refitd.settings import Settings
from refitd.state.journal.condition import Sound
from refitd.state.journal.origin import NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for: repairs, every byte read, engines asked."""

    repair: bool = False
    deep: bool = False
    engines: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer. `asked` counts the engines that were asked."""

    root: str
    journal: str
    asked: int
    findings: Sequence[Finding]

    @property
    def open(self) -> list[Finding]:
        """What still disagrees."""
        return [finding for finding in self.findings if finding.is_open]


async def check(settings: Settings, wish: Wish, tell: Telling) -> Report:
    """Check a root. While a service runs on it, nothing is repaired and engines are not troubled with hashing.

    Raises:
        StartRefusedError: the root is no folder; or repairs are asked for while a service runs, or cannot be made.
        OSError, ValueError: the lock, the engines file or the root's note of its journal cannot be used.
    """
    root = settings.root.resolve()
    if not root.is_dir():
        raise StartRefusedError(f"the root {root} is no folder: name another with --root")
    if not wish.repair:
        with still(root) as running:
            facts, _ = await _gather(settings, root, wish, running, tell)
            findings = compare(facts)
    else:
        with owned(root):
            facts, roster = await _gather(settings, root, wish, None, tell)
            tell.say("repairing")
            findings = await mend(settings, compare(facts), roster)
    return Report(root=str(root), journal=str(facts.journal.path), asked=len(facts.engines or ()), findings=findings)


async def _gather(
    settings: Settings, root: Path, wish: Wish, running: str | None, tell: Telling
) -> tuple[Facts, Roster]:
    tell.say("reading the journal")
    journal = await asyncio.to_thread(read_journal, settings.state_folder, root)
    roster = roster_of(settings, journal.engines)
    origin = journal.condition.origin if isinstance(journal.condition, Sound) else NEW
    files = DiskFiles(root, RootGuard(root, origin.root))
    disk = await look_at_disk(
        root,
        files,
        journal.versions.values(),
        DiskCopies(root, settings.copies_folder),
        deep=wish.deep,
        incoming_ttl=settings.incoming_ttl,
        tell=tell,
    )
    engines = None
    if wish.engines:
        tell.say("asking the engines")
        engines = await roster.ask(sorted(roster.specs), contents=running is None)
    return Facts(journal=journal, disk=disk, engines=engines, running=running), roster
