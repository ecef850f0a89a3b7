"""Of which versions a host has others than its hub, and which of them may go. Pure.

A hub that has lost its root may have a version of a name that hosts have with other contents. A host serves nothing
under that name but what it has proved. Where nothing here needs its own version of the name, that is retired and
deleted like any other, and then the hub's is pulled and proved anew. Else the host waits, and says for what.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from refitd.policy.pulls import Pullable
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

ANOTHER = "the upstream has another version of this name"  # why one goes


def is_other(here: VersionRecord | None, digest: str | None) -> bool:
    """Whether a host has another version of a name than its upstream.

    Args:
        here: what the host knows of its own.
        digest: of the upstream's, None where that is not known.
    """
    if here is None or not here.state.may_have_good_files or here.digest is None:
        return False
    return digest is not None and here.digest != digest


def others_of(offered: Sequence[Pullable], here: Mapping[str, VersionRecord]) -> frozenset[str]:
    """The ids of the versions of an upstream of which this host has others.

    Args:
        offered: the upstream's good versions.
        here: what this host knows of versions, by id.
    """
    return frozenset(each.id for each in offered if is_other(here.get(each.id), each.digest))


def standing_on(version: VersionRecord, versions: Collection[VersionRecord]) -> list[VersionRecord]:
    """A version, and the good deltas here that stand on it."""
    found = {version.id: version}
    while more := [v for v in versions if v.id not in found and v.base in found and v.state is VersionState.SEALED]:
        found.update({each.id: each for each in more})
    return list(found.values())


def why_it_stays(
    going: Sequence[VersionRecord], engines: Iterable[EngineRecord], needed: Collection[str | None]
) -> str | None:
    """Why versions may not be retired, in a sentence; None where nothing here serves them, loads them or needs them.

    Args:
        going: the versions.
        engines: those of this host, and those that are named no more and may still read something.
        needed: the ids of what engines here are loaded with, are to serve, or go back to.
    """
    names = {version.id for version in going}
    if pinned := next((version.id for version in going if version.pinned), None):
        return f"{pinned} is pinned here"
    for engine in engines:
        reads = {engine.serving, engine.held, engine.beneath, *engine.unproven}
        if used := next(iter(sorted(name for name in reads if name in names)), None):
            return f"engine {engine.id} serves {used}, or may read it"
    if used := next(iter(sorted(name for name in needed if name is not None and name in names)), None):
        return f"engines here are to serve {used}"
    return None
