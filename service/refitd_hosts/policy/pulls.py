"""Which versions a follower pulls from its upstream, and in which order. Pure.

    first     what this host is to serve (`desired`), with the deltas and the full version beneath it that it lacks
    then      the newest good version of the run, likewise, so that it is there when its turn comes

Versions in between are skipped. A delta goes after what it stands on, as far down as this host lacks it. A version that
this host has rejected is not pulled again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import FOR_EVERY_NOTICE
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import VersionState


class PullableVersion(Protocol):
    """What an upstream says of a version that it has."""

    @property
    def id(self) -> str: ...
    @property
    def order(self) -> Order: ...
    @property
    def base(self) -> str | None: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def barred(self) -> bool: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def allow_missing(self) -> tuple[str, ...]: ...
    @property
    def allow_extra(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PullPlan:
    """`pull` are ids in the order in which to pull. `needs` are all that must stay on this host. `lacks` is why
    `desired` cannot be had, a sentence.
    """

    pull: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    lacks: str | None = None


def plan_pulls(
    offered: Sequence[PullableVersion],
    desired: str | None,
    here: Mapping[str, VersionState],
    *,
    refused: Collection[str] = (),
) -> PullPlan:
    """Decide what to pull of a run.

    Args:
        desired: the id of the version that this host is to serve; None where that was not said yet.
        refused: ids of versions that are not tried now.
    """
    by_id = {version.id: version for version in offered}
    pull: dict[str, None] = {}
    needs: set[str] = set()
    lacks: str | None = None
    newest = max((v for v in offered if not v.barred), key=lambda version: version.order, default=None)
    for goal in (desired, None if newest is None else newest.id):
        if goal is None:
            continue
        chain, why = _chain(goal, by_id, here)
        needs.update(chain)
        wanted = [each for each in chain if not _holds(here, each)]
        if why is None and any(each in refused for each in wanted):
            why = f"{goal} is tried again later"
        if why is None:
            pull.update(dict.fromkeys(wanted))
        elif goal == desired:
            lacks = why
    return PullPlan(pull=tuple(pull), needs=frozenset(needs), lacks=lacks)


def as_told(known: VersionRecord, told: PullableVersion) -> VersionRecord:
    """A version with what its upstream says: whether it is pinned or barred, and what its notice allowed.

    A version that was rejected for what the notice allows is judged again. What this host has given up itself stays
    barred,
    else its engines would go there again at each look; where the upstream bars it as well, the bar is the upstream's.
    """
    before = known.announced
    may_lack = tuple(dict.fromkeys((*before.may_lack, *told.allow_missing)))
    given_up = None if told.barred else known.career.given_up
    now = known.having(
        pinned=told.pinned,
        barred=told.barred or given_up is not None,
        given_up=given_up,
        may_lack=may_lack,
        allow_extra=before.allow_extra or told.allow_extra,
    )
    if now.announced != before and known.state is VersionState.REJECTED and known.verdict.code not in FOR_EVERY_NOTICE:
        return now.having(state=VersionState.ANNOUNCED, reason=None, code=None)
    return now


def all_as_told(
    known: Mapping[str, VersionRecord], offered: Sequence[PullableVersion], barred: Collection[str]
) -> list[VersionRecord]:
    """The records of versions of which the upstream says something else than before.

    Args:
        barred: the ids of versions that the upstream has barred and does not offer.
    """
    now = [as_told(known[told.id], told) for told in offered if told.id in known]
    now += [known[each].having(barred=True, given_up=None) for each in barred if each in known]
    return [record for record in now if record != known[record.id]]


def why_not_good(wanted: VersionRecord | None) -> str | None:
    """Why a version that is here cannot be served, in a sentence; None where nothing is known of that."""
    stuck = {VersionState.SETTLING, VersionState.UNKNOWN, VersionState.REJECTED}
    if wanted is None or wanted.state not in stuck or wanted.reason is None:
        return None
    return f"{wanted.id} is wanted, and what lies at {wanted.path} on this host is {wanted.state}: {wanted.reason}"


def pull_fault(
    goal: str, offered: Sequence[PullableVersion], here: Mapping[str, VersionState], failures: Mapping[str, str]
) -> str | None:
    """Why a version cannot be had, in a sentence; None where it can, or where a pull was only cut short.

    Args:
        failures: by the ids of versions, why they could not be had.
    """
    chain, why = _chain(goal, {version.id: version for version in offered}, here)
    failed = next((each for each in chain if each in failures and not _holds(here, each)), None)
    return why if failed is None else f"{failed} was not pulled: {failures[failed]}"


def is_held_back(desired: str, before: str | None) -> bool:
    """Whether a host stays where it is while its upstream has paused the run: it goes back, but to nothing newer.

    The ids tell: the upstream may have lost either version's files.

    Args:
        desired: the id of the version that the upstream wants.
        before: the id that it wanted before, None where none was heard yet.
    """
    wanted, had = parse_version_id(desired), parse_version_id(before or "")
    return wanted is None or had is None or wanted[1] > had[1]


def _chain(
    goal: str, offered: Mapping[str, PullableVersion], here: Mapping[str, VersionState]
) -> tuple[list[str], str | None]:
    """A version and what it stands on, the lowest first; and why it cannot be had, None where it can."""
    chain: list[str] = []
    link: str | None = goal
    while link is not None and link not in chain:
        chain.insert(0, link)
        version = offered.get(link)
        if version is None:
            why = f"the upstream does not have {link} any more, which {goal} needs"
            return chain, None if _holds(here, link) else why
        if version.digest is None and not _holds(here, link):
            return chain, f"{link} has no manifest at the upstream: refitd's publisher did not write it"
        link = version.base
    return chain, None


def _holds(here: Mapping[str, VersionState], version: str) -> bool:
    state = here.get(version)
    return state is not None and not state.is_gone
