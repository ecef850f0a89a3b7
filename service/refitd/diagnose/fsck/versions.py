"""The versions that the journal knows, held against the folders on disk. Pure."""

from collections.abc import Iterator

from refitd.catalog.files import Unreadable
from refitd.diagnose.fsck.facts import DiskFacts, JournalFacts
from refitd.diagnose.fsck.finding import Finding, Kind, Repair, Severity
from refitd.policy.chain import NoBase, chain_of
from refitd.root.scan import Listing, ListingFailed
from refitd.state.journal.condition import Sound
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import version_id
from refitd_client.contract.states import Kind as VersionKind
from refitd_client.contract.states import VersionState


def compare_versions(journal: JournalFacts, disk: DiskFacts) -> Iterator[Finding]:
    """Where a version is not what the journal says, and what it does not know."""
    if isinstance(disk.listing, ListingFailed):
        yield _root(Kind.ROOT_UNREADABLE, disk.listing.reason, "see to it; nothing is deleted meanwhile")
        return
    sealed = [version for version in journal.versions.values() if version.state is VersionState.SEALED]
    if sealed and not disk.listing.found:
        text = f"the root is empty, and the journal knows {len(sealed)} good versions in it"
        yield _root(Kind.ROOT_EMPTY, text, "is it mounted? Nothing is marked as lost, and nothing deleted")
        return
    for version in sealed:
        yield from _of_sealed(version, disk)
        yield from _baseless(version, journal)
    yield from _reclaimed(journal, disk)
    yield from _rollouts(journal)
    if isinstance(journal.condition, Sound):
        yield from _unknown(journal, disk.listing)


def _of_sealed(version: VersionRecord, disk: DiskFacts) -> Iterator[Finding]:
    found = disk.signatures.get(version.path)
    digest = disk.digests.get(version.path)
    if isinstance(found, Unreadable):
        text, advice = (
            f"{version.path} cannot be read: {found.reason}",
            "see to it: that proves nothing",
        )
        yield _of(version, Kind.VERSION_UNREADABLE, text, advice, severity=Severity.WARNING)
    elif found is None:
        yield _lost(version, Kind.VERSION_GONE, f"{version.path} is gone, and the journal says SEALED")
    elif found != version.signature:
        yield _lost(version, Kind.VERSION_CHANGED, f"{version.path} has changed since it was sealed")
    elif isinstance(digest, Unreadable):
        text = f"{version.path} cannot be read to its end: {digest.reason}"
        yield _of(version, Kind.VERSION_UNREADABLE, text, "see to its disk", severity=Severity.WARNING)
    elif digest is not None and digest != version.digest:
        text = f"the bytes in {version.path} are not those that were sealed, though sizes and times are"
        yield _lost(version, Kind.VERSION_DAMAGED, text)


def _baseless(version: VersionRecord, journal: JournalFacts) -> Iterator[Finding]:
    if version.kind is not VersionKind.DELTA or version.served_at is not None:
        return
    chain = chain_of(version, journal.versions)
    if isinstance(chain, NoBase):
        advice = "no engine gets it, unless a copy is far enough; the next full version ends that"
        text = f"a delta that stands on nothing: {chain.reason}"
        yield _of(version, Kind.DELTA_BASELESS, text, advice, severity=Severity.WARNING)


def _reclaimed(journal: JournalFacts, disk: DiskFacts) -> Iterator[Finding]:
    """What was deleted, or was about to be when the service stopped."""
    living = {v.path for v in journal.versions.values() if v.state is not VersionState.DELETED}
    for version in journal.versions.values():
        is_there = disk.signatures.get(version.path) is not None
        if version.state is VersionState.DELETED and is_there and version.path not in living:
            text = f"{version.path} is there, and the journal says that it was deleted"
            advice = "engines never get it and refitd never deletes it: move it away, or publish it as a new step"
            yield _of(version, Kind.VERSION_BACK, text, advice, severity=Severity.WARNING)
        elif version.state is VersionState.RETIRED:
            state = "its folder is still there" if is_there else "its folder is out of the way already"
            yield _of(
                version,
                Kind.VERSION_HALF_RECLAIMED,
                f"it was being deleted when the service stopped: {state}",
                "the service's next sweep goes on with it",
                severity=Severity.WARNING if is_there else Severity.INFO,
                repair=Repair.FINISH_RECLAIM,
            )


def _rollouts(journal: JournalFacts) -> Iterator[Finding]:
    for rollout in journal.rollouts:
        if rollout.version not in journal.versions:
            yield Finding(
                severity=Severity.WARNING,
                kind=Kind.ROLLOUT_DANGLING,
                subject=rollout.run,
                text=f"rollout {rollout.number} goes to {rollout.version}, which the journal does not know",
                advice="the service begins another one to the newest good version",
            )


def _unknown(journal: JournalFacts, listing: Listing) -> Iterator[Finding]:
    paths = {version.path for version in journal.versions.values()}
    for found in listing.found:
        if found.path not in paths and version_id(found.run, found.order) not in journal.versions:
            yield Finding(
                severity=Severity.INFO,
                kind=Kind.VERSION_UNKNOWN,
                subject=version_id(found.run, found.order),
                text=f"{found.path} is there, and the journal does not know it yet",
                advice="the service validates it when it runs",
            )


def _lost(version: VersionRecord, kind: Kind, text: str) -> Finding:
    advice = "no engine is loaded with it any more: publish the step again, or roll back"
    return _of(version, kind, text, advice, repair=Repair.MARK_LOST)


def _of(
    version: VersionRecord,
    kind: Kind,
    text: str,
    advice: str,
    *,
    severity: Severity = Severity.ERROR,
    repair: Repair | None = None,
) -> Finding:
    return Finding(severity=severity, kind=kind, subject=version.id, text=text, advice=advice, repair=repair)


def _root(kind: Kind, text: str, advice: str) -> Finding:
    return Finding(severity=Severity.ERROR, kind=kind, subject="root", text=text, advice=advice)
