"""What a host that follows has to say of its upstream, and what is decided there alone. Pure.

The upstream decides where engines go, which versions are barred and pinned, and when the run ends: what an operator did
about that on this host would be undone at the next look. What he does to this host's own updates and engines stays.
"""

from collections.abc import Collection

from refitd.state.faults import UpstreamWord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import VersionState
from refitd_client.contract.stores import is_bucket_url


def whom_it_follows(word: UpstreamWord | None) -> str | None:
    if word is None:
        return None
    return f"This host follows {word.name}" + ("." if is_bucket_url(word.name) else f" as {word.host}.")


def silence(word: UpstreamWord | None) -> str | None:
    """Say since when nothing was heard; None while the upstream is heard, or where none is followed."""
    if word is None or word.silent_since is None:
        return None
    since = f"since {word.silent_since}" if word.silent_since else "since this service started"
    return f"Nothing was heard from {word.name} {since}: whether it has anything newer is not known here"


def disobeyed(word: UpstreamWord | None) -> str | None:
    """Say why engines here do not go where the upstream wants; None where they do, or where it is not heard."""
    if word is None or word.silent_since is not None or word.disobeyed is None:
        return None
    return word.disobeyed[0].upper() + word.disobeyed[1:]


def waits_for(
    word: UpstreamWord | None, target: VersionRecord | None, newest: VersionRecord | None, *, is_paused: bool = False
) -> str | None:
    """Say what keeps a host from anything newer, or what it pulls; None where that is nothing of the upstream's.

    Args:
        target: what the engines of this host should serve now.
        is_paused: whether updates of the run are paused on this host itself.
    """
    if word is None or word.silent_since is not None:  # what it said last may be over
        return None
    if word.is_paused:
        return f"{word.name} has paused the run: this host goes to nothing newer before it is resumed there"
    if is_here(newest, target) and newest is not None and (newest.id != word.wanted or is_paused):
        why = _why_paused(word, newest) if is_paused else _why_not_yet(word)
        return f"Step {newest.order.step:,} is here and good: {why}"
    pulled = parse_version_id(word.pulling or "")
    if pulled is not None and word.ahead is not None:
        return f"Step {pulled[1].step:,} waits to be pulled from {word.name}: {hosts_before(word.ahead)}"
    return None if pulled is None else f"Step {pulled[1].step:,} is pulled from {word.source or word.name}"


def hosts_before(ahead: int) -> str:
    if not ahead:
        return "it asks for its turn"
    return "1 host pulls before this one" if ahead == 1 else f"{ahead} hosts pull before this one"


def last_report(word: UpstreamWord | None, now: float) -> list[str]:
    """Say how old the last report is that a hub has taken of this host; nothing where it follows an object store."""
    if word is None or is_bucket_url(word.name):
        return []
    if word.reported is None:
        return [f"{word.name} has taken no report of this host since this service started."]
    return [f"{word.name} took the last report of this host {now - word.reported:,.0f} s ago."]


def without_store(store_fault: str | None) -> list[str]:
    """Say why the object store is not asked that an upstream has named; nothing where it is."""
    return [] if store_fault is None else [f"It pulls from its upstream, and not from the object store: {store_fault}."]


def is_here(newest: VersionRecord | None, target: VersionRecord | None) -> bool:
    """Whether a good version is here that is newer than what this host's engines should serve."""
    if newest is None or newest.barred or newest.state is not VersionState.SEALED:
        return False
    return target is None or newest.order > target.order


def pulls_newer(word: UpstreamWord | None, newest: VersionRecord | None) -> bool:
    """Whether a version is pulled that is newer than the newest that is here."""
    pulled = parse_version_id((word.pulling if word is not None else None) or "")
    return pulled is not None and newest is not None and pulled[1] > newest.order


def _why_paused(word: UpstreamWord, newest: VersionRecord) -> str:
    """A hub that leads this host orders nothing newer while that is paused."""
    if newest.id != word.wanted and not word.leads:
        return _why_not_yet(word)
    ordered = "" if newest.id == word.wanted else f", and {word.name} orders it then"
    return f"engines load it when updates are resumed here (refitd resume {newest.run}){ordered}"


def _why_not_yet(word: UpstreamWord) -> str:
    if word.leads:
        return f"engines load it when {word.name} orders it, which may bring other hosts there first"
    return f"{word.name} wants {word.elsewhere or 'no version'} to be served"


def owned_by(upstreams: Collection[str], do: str) -> str:
    """Say whom this host leaves something to, and what to do instead."""
    return f"this service follows {', '.join(upstreams)}: {do}"


def decided_by(upstream: str, do: str) -> str:
    """Say that an upstream decides something, and to do it there. In an object store nothing can be done."""
    where = "at the service that pushes into it (refitd serve --push)" if is_bucket_url(upstream) else "there"
    return owned_by([upstream], f"{do} {where}")


def not_brought(upstream: str, run: str) -> str:
    """Say why a run that this host does not follow gets no engines here, and what to do, without a full stop."""
    return (
        f"This service follows {upstream}, which decides where engines go: none is brought to {run} here. Publish it "
        f"there; 'refitd runs close {run}' says here that it has ended"
    )


def decides_run(word: UpstreamWord | None, run: str) -> bool:
    """Whether the upstream decides where engines of a run go. Before the first look it may."""
    return word is None or word.run == run


def decides_end(word: UpstreamWord | None, run: str) -> bool:
    """Whether the upstream decides when a run ends: it has not ended there."""
    return decides_run(word, run) and not (word is not None and word.has_ended)


def decides_pin(word: UpstreamWord | None, version: VersionRecord) -> bool:
    """Whether the upstream decides whether a version is pinned. A version that it has no more is this host's own."""
    listed = None if word is None else word.listed
    return decides_run(word, version.run) and (listed is None or version.id in listed)
