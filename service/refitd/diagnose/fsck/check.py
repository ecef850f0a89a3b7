"""The whole of fsck: gather, compare, and repair if asked to."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from refitd.catalog.files import DiskFiles
from refitd.diagnose.fsck.compare import FsckFacts, compare
from refitd.diagnose.fsck.disagreement import Disagreement
from refitd.diagnose.fsck.disk import CheckProgress, look_at_disk
from refitd.diagnose.fsck.mend import mend
from refitd.diagnose.journal import read_journal, still
from refitd.diagnose.roster import roster_of
from refitd.materialize.disk import DiskCopies
from refitd.root.mark import RootGuard
from refitd.root.ownership import StartRefusedError, owned
from refitd.settings import Settings
from refitd.state.journal.condition import Sound
from refitd.state.records import NEW


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckReport:
    """What fsck found. `asked` counts the engines that were asked."""

    root: str
    journal: str
    asked: int
    findings: Sequence[Disagreement]

    @property
    def open(self) -> list[Disagreement]:
        """The findings that are not repaired."""
        return [finding for finding in self.findings if finding.is_open]


async def check(
    settings: Settings, progress: CheckProgress, *, repair: bool = False, deep: bool = False, ask_engines: bool = True
) -> FsckReport:
    """Check a root. While a service runs on it nothing is repaired, and engines do not hash their tensors.

    Args:
        settings: those of the service.
        progress: shows what is read.
        repair: make the repairs that are safe.
        deep: read every byte of every good version.
        ask_engines: ask engines what they serve.

    Raises:
        StartRefusedError: the root is no folder; or repairs are asked for while a service runs, or cannot be made.
        OSError, ValueError: the lock, the engines file or the root's note of its journal cannot be used.
    """
    root = settings.root.resolve()
    if not root.is_dir():
        raise StartRefusedError(f"the root {root} is no folder: name another with --root")
    with owned(root) if repair else still(root) as running:
        held_by = running if isinstance(running, str) else None
        progress.say("reading the journal")
        journal = await asyncio.to_thread(read_journal, settings, root)
        roster = roster_of(settings, journal.engines)
        origin = journal.condition.origin if isinstance(journal.condition, Sound) else NEW
        disk = await look_at_disk(
            root,
            DiskFiles(root, RootGuard(root, origin.root)),
            journal.versions.values(),
            DiskCopies(root, settings.copies_folder),
            deep=deep,
            incoming_ttl=settings.incoming_ttl,
            progress=progress,
        )
        engines = None
        if ask_engines:
            progress.say("asking the engines")
            engines = await roster.ask(sorted(roster.specs), contents=held_by is None)
        findings = compare(FsckFacts(journal=journal, disk=disk, engines=engines, running=held_by))
        if repair:
            progress.say("repairing")
            findings = await mend(settings, findings, roster)
    return FsckReport(root=str(root), journal=str(journal.path), asked=len(engines or ()), findings=findings)
