"""What a host that follows has to say of its upstream: since when that is silent, and what is waited for. Pure."""

from refitd.state.upstream import UpstreamWord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import VersionState


def silence(word: UpstreamWord | None) -> str | None:
    """Say since when nothing was heard; None while the upstream is heard, or where none is followed."""
    if word is None or word.silent_since is None:
        return None
    since = f"since {word.silent_since}" if word.silent_since else "since this service started"
    return f"Nothing was heard from {word.name} {since}: whether it has anything newer is not known here"


def waits_for(word: UpstreamWord | None, target: VersionRecord | None, newest: VersionRecord | None) -> str | None:
    """Say what keeps a host from anything newer, or what it pulls; None where that is nothing of the upstream's.

    Args:
        word: what is known of the upstream.
        target: what the engines of this host should serve now.
        newest: the newest version that is here.
    """
    if word is None or word.silent_since is not None:  # what it said last may be over
        return None
    if word.is_paused:
        return f"{word.name} has paused the run: this host goes to nothing newer before it is resumed there"
    if is_here(newest, target) and newest is not None and newest.id != word.wanted:
        return f"Step {newest.order.step:,} is here and good: {_why_not_yet(word)}"
    pulled = parse_version_id(word.pulling or "")
    return None if pulled is None else f"Step {pulled[1].step:,} is pulled from {word.name}"


def is_here(newest: VersionRecord | None, target: VersionRecord | None) -> bool:
    """Whether a good version is here that is newer than what this host's engines should serve."""
    if newest is None or newest.barred or newest.state is not VersionState.SEALED:
        return False
    return target is None or newest.order > target.order


def pulls_newer(word: UpstreamWord | None, newest: VersionRecord | None) -> bool:
    """Whether a version is pulled that is newer than the newest that is here."""
    pulled = parse_version_id((word.pulling if word is not None else None) or "")
    return pulled is not None and newest is not None and pulled[1] > newest.order


def _why_not_yet(word: UpstreamWord) -> str:
    if word.is_untold:
        return f"{word.name} has not said yet whether it leads this host"
    if word.leads:
        return f"engines load it when {word.name} orders it, which may bring other hosts there first"
    return f"{word.name} wants {word.elsewhere or 'no version'} to be served"
