"""What lies under the root, compared with the versions that the journal knows. Pure."""

from collections.abc import Iterator

from refitd.catalog.files import Unreadable
from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair, Severity, error, note, warning
from refitd.diagnose.fsck.disk import TRASH_PATH, CopyFacts, DiskFacts
from refitd.diagnose.journal import JournalFacts
from refitd.policy.chain import NoBase, chain_of
from refitd.root.outcome import Slot
from refitd.root.scan import Listing, ListingFailed
from refitd.state.journal.condition import Sound
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import version_id
from refitd_client.contract.states import Kind, VersionState


def compare_versions(journal: JournalFacts, disk: DiskFacts) -> Iterator[Disagreement]:
    """Find versions that differ from the journal's records, and versions that it does not know."""
    if isinstance(disk.listing, ListingFailed):
        yield error(FsckKind.ROOT_UNREADABLE, "root", disk.listing.reason, "see to it; nothing is deleted meanwhile")
        return
    sealed = [version for version in journal.versions.values() if version.state is VersionState.SEALED]
    if sealed and not disk.listing.found:
        text = f"the root is empty, and the journal knows {len(sealed)} good versions in it"
        yield error(FsckKind.ROOT_EMPTY, "root", text, "is it mounted? Nothing is marked as lost, and nothing deleted")
        return
    for version in sealed:
        yield from _of_sealed(version, disk)
        yield from _baseless(version, journal)
    yield from _reclaimed(journal, disk)
    yield from _updates(journal)
    if isinstance(journal.condition, Sound):
        yield from _unknown(journal, disk.listing)


def _of_sealed(version: VersionRecord, disk: DiskFacts) -> Iterator[Disagreement]:
    found = disk.signatures.get(version.path)
    digest = disk.digests.get(version.path)
    if isinstance(found, Unreadable):
        text, advice = (
            f"{version.path} cannot be read: {found.reason}",
            "see to it: that proves nothing",
        )
        yield warning(FsckKind.VERSION_UNREADABLE, version.id, text, advice)
    elif found is None:
        yield _lost(version, FsckKind.VERSION_GONE, f"{version.path} is gone, and the journal says SEALED")
    elif found != version.signature and digest != version.digest:
        yield _lost(version, FsckKind.VERSION_CHANGED, f"{version.path} has changed since it was sealed")
    elif isinstance(digest, Unreadable):
        text = f"{version.path} cannot be read to its end: {digest.reason}"
        yield warning(FsckKind.VERSION_UNREADABLE, version.id, text, "see to its disk")
    elif digest is not None and digest != version.digest:
        text = f"the bytes in {version.path} are not those that were sealed, though sizes and times are"
        yield _lost(version, FsckKind.VERSION_DAMAGED, text)


def _lost(version: VersionRecord, kind: FsckKind, text: str) -> Disagreement:
    advice = "no engine is loaded with it any more: publish the step again, or roll back"
    return error(kind, version.id, text, advice, Repair.MARK_LOST)


def _baseless(version: VersionRecord, journal: JournalFacts) -> Iterator[Disagreement]:
    if version.kind is not Kind.DELTA or version.served_at is not None:
        return
    chain = chain_of(version, journal.versions)
    if isinstance(chain, NoBase):
        advice = "no engine gets it, unless a copy is far enough; the next full version ends that"
        yield warning(FsckKind.DELTA_BASELESS, version.id, f"a delta that stands on nothing: {chain.reason}", advice)


def _reclaimed(journal: JournalFacts, disk: DiskFacts) -> Iterator[Disagreement]:
    """Find deleted versions that are back, and deletions that were cut off when the service stopped."""
    living = {v.path for v in journal.versions.values() if v.state is not VersionState.DELETED}
    for version in journal.versions.values():
        is_there = disk.signatures.get(version.path) is not None
        if version.state is VersionState.DELETED and is_there and version.path not in living:
            text = f"{version.path} is there, and the journal says that it was deleted"
            advice = "engines never get it and refitd never deletes it: move it away, or publish it as a new step"
            yield warning(FsckKind.VERSION_BACK, version.id, text, advice)
        elif version.state is VersionState.RETIRED:
            state = "its folder is still there" if is_there else "its folder is out of the way already"
            yield Disagreement(
                Severity.WARNING if is_there else Severity.INFO,
                FsckKind.VERSION_HALF_RECLAIMED,
                version.id,
                f"it was being deleted when the service stopped: {state}",
                "the service's next sweep goes on with it",
                Repair.FINISH_RECLAIM,
            )


def _updates(journal: JournalFacts) -> Iterator[Disagreement]:
    for update in journal.updates:
        if update.version not in journal.versions:
            yield warning(
                FsckKind.UPDATE_DANGLING,
                update.run,
                f"update {update.number} goes to {update.version}, which the journal does not know",
                "the service begins another one to the newest good version",
            )


def _unknown(journal: JournalFacts, listing: Listing) -> Iterator[Disagreement]:
    paths = {version.path for version in journal.versions.values()}
    for found in listing.found:
        if found.path not in paths and version_id(found.run, found.order) not in journal.versions:
            yield note(
                FsckKind.VERSION_UNKNOWN,
                version_id(found.run, found.order),
                f"{found.path} is there, and the journal does not know it yet",
                "the service validates it when it runs",
            )


def compare_leftovers(disk: DiskFacts) -> Iterator[Disagreement]:
    """Find what publishers and killed sweeps left, and what is not refitd's."""
    for found in disk.incoming:
        if found.abandoned:
            advice = "the service takes it away as well"
            yield warning(FsckKind.INCOMING_ABANDONED, found.path, found.reason, advice, Repair.DISCARD_INCOMING)
    if disk.trash:
        count = len(disk.trash)
        text = f"{count} folder{'s' * (count > 1)} of a sweep that was killed in mid-delete"
        yield warning(FsckKind.TRASH_LEFT, TRASH_PATH, text, "the service empties it as well", Repair.EMPTY_TRASH)
    for slot in disk.slots:
        yield from _of_slot(slot)
    for found in disk.copies:
        yield from _of_copy(found)
    for foreign in disk.foreign:
        yield _foreign(foreign.path, f"a {foreign.noun} that is none of refitd's: it is never touched")
    if disk.unlisted:
        yield _foreign("…", f"and {disk.unlisted} more that are none of refitd's")


def _of_slot(slot: Slot) -> Iterator[Disagreement]:
    if slot.fault is None:
        return
    text = f"it {slot.fault}"
    if slot.ours:
        advice = "the service takes it away as well"
        yield warning(FsckKind.SLOT_DAMAGED, slot.path, f"{text}: no publisher takes it", advice, Repair.DISCARD_SLOT)
    elif slot.run:
        yield _foreign(slot.path, slot.fault)
    else:
        advice, severity = "move it away: the service makes the folder anew", Severity.WARNING
        yield Disagreement(severity, FsckKind.SLOTS_UNUSABLE, slot.path, text, advice)


def _of_copy(found: CopyFacts) -> Iterator[Disagreement]:
    copy = found.copy
    if copy.fault is not None:
        yield _foreign(copy.path, copy.fault)
    elif copy.order is None:
        text = "a copy for deltas that holds nothing: its writing was cut off, or it was changed since"
        advice = "the service writes it anew when it is needed"
        severity, kind = Severity.INFO, FsckKind.COPY_UNFINISHED
        yield Disagreement(severity, kind, copy.path, text, advice)
    elif isinstance(found.odd, Unreadable):
        text, kind = f"the copy cannot be read to its end: {found.odd.reason}", FsckKind.COPY_UNREADABLE
        yield warning(kind, copy.path, text, "see to its disk")
    elif found.odd is not None:
        advice = f"engines that were loaded from it may not serve {copy.holds}: ask for a resync of each"
        text, repair = f"its note says {copy.holds}, and {found.odd}", Repair.DISOWN_COPY
        yield error(FsckKind.COPY_DAMAGED, copy.path, text, advice, repair)


def _foreign(path: str, text: str) -> Disagreement:
    return note(FsckKind.FOREIGN, path, text, "nothing has to be done")
