"""What disk space is kept for, in a few words that a graph can stack. Pure.

`keep` gives every reason, in sentences; here each line of a sweep gets one word, that of its strongest reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from refitd.policy.leases import Lease, LeaseKind
from refitd.policy.lines import TRASH_PATH
from refitd.state.version import EVIDENCE, VersionRecord
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER
from refitd_client.contract.slot import SLOTS
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Reclaimable


class Kept(StrEnum):
    """Why bytes stay, the strongest reason first."""

    READ = "read"  # an engine serves it, loads it, or may still be reading it
    TARGET = "target"  # engines are on their way to it, or would be brought back to it
    PINNED = "pinned"
    UNDECIDED = "undecided"  # nobody knows yet whether it is good
    EVIDENCE = "evidence"  # REJECTED or LOST, and not for long
    RULE = "rule"  # the keep rules: the newest ones, every Nth, what a kept delta leads from
    GOING = "going"  # nobody needs it, and it could not be taken away yet
    INCOMING = "incoming"  # a publisher is writing it, or left it behind
    SLOT = "slot"  # old files that a publisher may write the next version into
    COPY = "copy"  # a model that deltas are applied to
    TRASH = "trash"  # deleted, and not gone from the disk yet
    FOREIGN = "foreign"  # not refitd's to delete; counts in no disk budget


_READ = frozenset({LeaseKind.SERVING, LeaseKind.LOADING, LeaseKind.UNPROVEN, LeaseKind.NAMED})
_UNDER_WAY = frozenset({LeaseKind.VALIDATING})


def bytes_by_reason(
    lines: Iterable[Reclaimable], versions: Mapping[str, VersionRecord], leases: Mapping[str, Sequence[Lease]]
) -> dict[Kept, int]:
    """Add up the lines of a sweep that are kept. `versions` are those that its lines name, as they are now."""
    found = dict.fromkeys(Kept, 0)
    for line in lines:
        found[Kept.FOREIGN] += line.foreign_bytes
        counted = (line.bytes or 0) - line.foreign_bytes
        if not line.keep or not counted:
            continue
        if line.version is None:
            found[_kind_of(line.path)] += counted
        elif (record := versions.get(line.version)) is not None:
            found[_why(record, leases.get(record.id, ()))] += counted
    return found


def _kind_of(path: str) -> Kept:
    """What a line without a version is about."""
    if path == TRASH_PATH:
        return Kept.TRASH
    if path.rpartition("/")[2].startswith(INCOMING_PREFIX):
        return Kept.INCOMING
    return Kept.SLOT if path.startswith(f"{SERVICE_FOLDER}/{SLOTS}/") else Kept.COPY


def _why(record: VersionRecord, leases: Sequence[Lease]) -> Kept:
    kinds = {lease.kind for lease in leases}
    if kinds & _READ:
        return Kept.READ
    if kinds - _UNDER_WAY:
        return Kept.TARGET
    if record.pinned:
        return Kept.PINNED
    if record.state.is_open:
        return Kept.UNDECIDED
    if record.state in EVIDENCE:
        return Kept.EVIDENCE
    return Kept.RULE if record.state is VersionState.SEALED else Kept.GOING
