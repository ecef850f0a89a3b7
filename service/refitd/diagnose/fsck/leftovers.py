"""What lies under the root beside versions: what publishers and sweeps left, and what is none of refitd's. Pure."""

from collections.abc import Iterator

from refitd.catalog.files import Unreadable
from refitd.diagnose.fsck.facts import CopyFacts, DiskFacts
from refitd.diagnose.fsck.finding import Finding, Kind, Repair, Severity
from refitd.root.leftovers import Slot
from refitd_client.contract.naming import SERVICE_FOLDER, TRASH

TRASH_PATH = f"{SERVICE_FOLDER}/{TRASH}"


def compare_leftovers(disk: DiskFacts) -> Iterator[Finding]:
    """Say what is left over."""
    for found in disk.incoming:
        if found.abandoned:
            advice = "the service takes it away as well"
            yield _of(Kind.INCOMING_ABANDONED, found.path, found.reason, advice, Repair.DISCARD_INCOMING)
    if disk.trash:
        count = len(disk.trash)
        text = f"{count} folder{'s' * (count > 1)} of a sweep that was killed in mid-delete"
        yield _of(Kind.TRASH_LEFT, TRASH_PATH, text, "the service empties it as well", Repair.EMPTY_TRASH)
    for slot in disk.slots:
        yield from _of_slot(slot)
    for found in disk.copies:
        yield from _of_copy(found)
    for foreign in disk.foreign:
        yield _foreign(foreign.path, f"a {foreign.noun} that is none of refitd's: it is never touched")
    if disk.unlisted:
        yield _foreign("…", f"and {disk.unlisted} more that are none of refitd's")


def _of_slot(slot: Slot) -> Iterator[Finding]:
    if slot.fault is None:
        return
    text = f"it {slot.fault}"
    if slot.ours:
        advice = "the service takes it away as well"
        yield _of(Kind.SLOT_DAMAGED, slot.path, f"{text}: no publisher takes it", advice, Repair.DISCARD_SLOT)
    elif slot.run:
        yield _foreign(slot.path, slot.fault)
    else:
        advice, severity = "move it away: the service makes the folder anew", Severity.WARNING
        yield Finding(severity=severity, kind=Kind.SLOTS_UNUSABLE, subject=slot.path, text=text, advice=advice)


def _of_copy(found: CopyFacts) -> Iterator[Finding]:
    copy = found.copy
    if copy.fault is not None:
        yield _foreign(copy.path, copy.fault)
    elif copy.order is None:
        text = "a copy for deltas that holds nothing: its writing was cut off, or it was changed since"
        advice = "the service writes it anew when it is needed"
        severity, kind = Severity.INFO, Kind.COPY_UNFINISHED
        yield Finding(severity=severity, kind=kind, subject=copy.path, text=text, advice=advice)
    elif isinstance(found.odd, Unreadable):
        text, kind = f"the copy cannot be read to its end: {found.odd.reason}", Kind.COPY_UNREADABLE
        yield Finding(severity=Severity.WARNING, kind=kind, subject=copy.path, text=text, advice="see to its disk")
    elif found.odd is not None:
        advice = f"engines that were loaded from it may not serve {copy.holds}: ask for a resync of each"
        text, repair = f"its note says {copy.holds}, and {found.odd}", Repair.DISOWN_COPY
        kind = Kind.COPY_DAMAGED
        yield Finding(severity=Severity.ERROR, kind=kind, subject=copy.path, text=text, advice=advice, repair=repair)


def _of(kind: Kind, path: str, text: str, advice: str, repair: Repair) -> Finding:
    return Finding(severity=Severity.WARNING, kind=kind, subject=path, text=text, advice=advice, repair=repair)


def _foreign(path: str, text: str) -> Finding:
    return Finding(severity=Severity.INFO, kind=Kind.FOREIGN, subject=path, text=text, advice="nothing has to be done")
