"""What lies under the root beside versions: what publishers and sweeps left, and what is none of refitd's. Pure."""

from collections.abc import Iterator

from refitd.fsck.facts import DiskFacts
from refitd.fsck.finding import Finding, Kind, Repair, Severity
from refitd.reclaim.trash import TRASH
from refitd_client.contract.naming import SERVICE_FOLDER

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
        if slot.fault is not None and slot.ours:
            text = f"it {slot.fault}: no publisher takes it"
            yield _of(Kind.SLOT_DAMAGED, slot.path, text, "the service takes it away as well", Repair.DISCARD_SLOT)
        elif slot.fault is not None:
            yield _foreign(slot.path, slot.fault)
    for foreign in disk.foreign:
        yield _foreign(foreign.path, f"a {foreign.noun} that is none of refitd's: it is never touched")
    if disk.unlisted:
        yield _foreign("…", f"and {disk.unlisted} more that are none of refitd's")


def _of(kind: Kind, path: str, text: str, advice: str, repair: Repair) -> Finding:
    return Finding(severity=Severity.WARNING, kind=kind, subject=path, text=text, advice=advice, repair=repair)


def _foreign(path: str, text: str) -> Finding:
    return Finding(severity=Severity.INFO, kind=Kind.FOREIGN, subject=path, text=text, advice="nothing has to be done")
