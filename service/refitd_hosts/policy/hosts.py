"""A host as its hub sees it: how far it is with what it was ordered to serve, and what proves that. Pure.

The hub compares hosts as it compares engines. A host's configuration and proof are made of those of its engines that
serve the version now: two hosts with engines of the same configurations have the same of both. Proofs that are no
digests, such as answers to a prompt, are equal on no two engines and are left out. A proof names what it is made of,
and
is compared with proofs that are made of the same.

A hub that has lost its root may have a version of a name that hosts have with other contents. A host serves nothing
under that name but what it has proved. Where nothing here needs its own version of the name, that is deleted, and then
the hub's is pulled. Else the host waits, and says for what.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from refitd.engine.fingerprints import ANSWERED, BY_HOST, names_of_means
from refitd.policy.traffic import is_proven
from refitd.state.records import EngineRecord, HostLead, UpdateRecord
from refitd.state.version import VersionRecord
from refitd.text import size_of
from refitd_client.contract.follow import (
    MAX_HOST_ENGINES,
    Following,
    HostEngine,
    HostEngines,
    HostReply,
    HostReport,
    OrderState,
)
from refitd_client.contract.naming import parse_version_id, version_id
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.stores import is_bucket_url
from refitd_hosts.policy.pulls import PullableVersion
from refitd_hosts.policy.upstream import hosts_before

_FAILED = frozenset({"NACK", "TAINTED"})
_LONGEST = 300  # characters of a reason
_MOST_GENERATIONS = 10_000  # of a run, as far as hosts are believed
_OBEYED = "after 'refitd rollback {run} --to {to}' at the hub hosts obey it"
_LOSS = "as after a loss of this service's root or journal"
_AFTER = "a publisher that is opened now begins after it"
ANEW = (
    "Publish something newer: a publisher that is opened now begins a generation where it has to "
    "('refitd publish --new-generation')"
)
IT_GOES = "nothing here serves it or needs it, so it is deleted, and then the upstream's is pulled"


def refusal_of(reply: HostReply, known: HostLead, upstream: str) -> str | None:
    """Why a reply of a hub is not obeyed, in a sentence; None where it is.

    Args:
        known: the lead that was obeyed last.
        upstream: what sentences call the hub.
    """
    newest = known.heard.get(reply.leader, 0)
    if reply.epoch >= newest:
        return None
    who = (known.told_by if reply.leader == known.leader else "") or "another service"
    since = f"{who} has led with epoch {newest} since: engines stay on what that has said"
    obeyed = _OBEYED.format(run="RUN", to="ID")
    return f"{reply.told_by or upstream} leads with epoch {reply.epoch}; {since}; {obeyed}"


def why_not_served(wanted: str, stands: Collection[str | None], *, knows: str | None) -> str | None:
    """Why this host does not go to a version that an upstream wants, as the end of a sentence about the upstream; None
    where it goes.

    A host goes back from nothing that its upstream does not know: that was restored from a backup, or its root was
    emptied.

    Args:
        stands: the ids of what engines here serve, or were to serve.
        knows: the id of the newest version that the upstream knows, "" for none; None where it may go back, as a store.
    """
    goal = parse_version_id(wanted)
    if goal is None or knows is None:
        return None
    newer = (id_ for id_ in stands if id_ is not None and (at := parse_version_id(id_)) and at[1] > goal[1])
    unknown = not_known_there(goal[0], newer, knows)
    if unknown is None:
        return None
    return (
        f"wants {wanted}, and does not know {unknown}, as after a loss of what it knew: engines stay there; "
        f"{_OBEYED.format(run=goal[0], to=wanted)}"
    )


def not_known(run: str, told: Following, known: str | None, leader: tuple[str, int]) -> tuple[str, int] | None:
    """What a host has that its hub does not know, as in `RunRecord.left`; None where there is nothing.

    Args:
        known: the id of the newest version of what the host has that the hub knows.
        leader: the hub's name, and its epoch.
    """
    newest = parse_version_id(known or "")
    orders = [at[1] for at in map(parse_version_id, named_by(told)) if at is not None and at[0] == run]
    order = max((each for each in orders if newest is None or each > newest[1]), default=None)
    heard = max(told.heard.get(leader[0], 0), told.fence if told.leader == leader[0] else 0)
    epoch = heard if heard > leader[1] else 0
    if order is None and not epoch:
        return None
    return "" if order is None else version_id(run, order), epoch


def unknown_at_hub(told: Following, known: str | None, digest_of: Callable[[str], str | None]) -> str | None:
    """The id of the version that a host has and its hub does not: it is newer than any that the hub knows, or the hub
    has another of that name. None where there is none.

    Args:
        known: the id of the newest version of its run that the hub knows, or that a rollback has left there.
        digest_of: a version at the hub, by its id; "" while it has no verdict, None where it is not known.
    """
    if told.run is None:
        return None
    newest, _ = not_known(told.run, told, known, ("", 0)) or ("", 0)
    others = (id_ for id_ in named_by(told) if digest_of(id_) not in {None, "", told.digests.get(id_)})
    return newest or next((id_ for id_ in others if id_ in told.digests), None)


def why_unknown(unknown: str, *, is_other: bool, target: str | None) -> str:
    """What a hub says of a version that a host has and the hub does not, and what helps: the end of a sentence about
    the host.

    Args:
        is_other: whether the hub has another of that name.
        target: the id of what the hub wants to be served; None where it has nothing.
    """
    if is_other:
        return f"has another {unknown} than this service, of the same name, {_LOSS}: its engines stay there. {ANEW}"
    parsed = parse_version_id(unknown)
    run = "RUN" if parsed is None else parsed[0]
    back = "" if target is None else f"; 'refitd rollback {run} --to {target}' has it go there"
    return (
        f"has {unknown}, which is not known here, {_LOSS}: its engines stay there until something newer is published "
        f"({_AFTER}){back}"
    )


def not_known_there(run: str, stands: Iterable[str | None], knows: str | None) -> str | None:
    """The id of the newest version in `stands` where the upstream does not know it.

    Args:
        stands: the ids of what engines here serve, or were to serve.
        knows: the id of the newest version that the upstream knows, "" for none.
    """
    limit = parse_version_id(knows or "")
    newest = max((at[1] for at in map(parse_version_id, filter(None, stands)) if at and at[0] == run), default=None)
    return None if newest is None or (limit is not None and limit[1] >= newest) else version_id(run, newest)


def why_lost(unknown: str) -> str:
    """What a host says of an upstream that does not know what engines here serve, and wants nothing."""
    return (
        f"does not know {unknown}, which engines here serve, as after a loss of what it knew: they stay there until "
        f"something newer is published there ({_AFTER})"
    )


def newest_on_hosts(run: str, reports: Iterable[HostReport], knows: Callable[[str], bool]) -> str | None:
    """The id of the newest version of a run that hosts have and their hub does not know; None where there is none.

    A host that lies costs a trainer a new generation, and no more: generations that no run comes to count for nothing.

    Args:
        knows: whether the hub knows a version, or has deleted it.
    """
    found = (id_ for each in reports for id_ in (*named_by(each.told), *each.holds) if not knows(id_))
    orders = (at[1] for at in map(parse_version_id, found) if at is not None and at[0] == run)
    newest = max((order for order in orders if order.generation <= _MOST_GENERATIONS), default=None)
    return None if newest is None else version_id(run, newest)


def why_hosts_stay(announced: str, on_hosts: str | None) -> str | None:
    """What a hub says of a version that is announced while hosts have something newer that the hub does not know, a
    sentence without a subject; None where they have not. The SDK asks before it names a version, and scripts do not.
    """
    new, had = parse_version_id(announced), parse_version_id(on_hosts or "")
    if new is None or had is None or new[1] > had[1]:
        return None
    return f"is older than {on_hosts}, which hosts have and this service does not know: they stay there. {ANEW}"


def stands_of(told: Following) -> dict[str, str | None]:
    """What a host's engines serve or were to serve, by the versions' ids, and the digests, None where it says none."""
    own = () if told.host is None else (engine.version for engine in told.host.engines)
    return {id_: told.digests.get(id_) for id_ in (told.serves, told.ordered, *own) if id_ is not None}


def named_by(told: Following) -> list[str]:
    """The ids of the versions that a host serves, and is or was to serve."""
    return [id_ for id_ in (told.serves, told.ordered, told.desired) if id_ is not None]


def order_state(
    desired: str | None,
    ordered: str | None,
    here: VersionRecord | None,
    engines: Sequence[EngineRecord],
    *,
    quorum: int,
    refused: str | None = None,
    paused: str | None = None,
) -> tuple[OrderState, str | None]:
    """How far a host is with what it is to serve, and why, in a sentence.

    Args:
        desired: the id of the version that the upstream wants.
        ordered: of the last such version that was good here.
        here: what this host knows of `desired`.
        quorum: engines that must serve a version before it counts as served.
        refused: why it cannot be pulled, None where it can.
        paused: why engines go to nothing newer (`why_it_waits`).
    """
    if here is not None and any(engine.serves_newer_than(here) for engine in engines):
        paused = None
    if desired is None:
        return OrderState.NONE, None
    if here is not None and here.state is VersionState.REJECTED:
        return OrderState.REFUSED, f"{desired} was rejected there: {here.reason}"
    if here is not None and here.barred:
        return OrderState.REFUSED, f"{desired} was given up there: {here.reason or 'it is barred'}"
    if refused is not None and ordered != desired:
        return OrderState.REFUSED, refused
    if ordered != desired:
        is_here = here is not None and here.state is VersionState.SEALED
        return OrderState.COMES, (is_here and paused) or f"{desired} is pulled and checked there"
    if is_proven(desired, engines, quorum):
        return OrderState.SERVED, None
    state, why = _of_engines(desired, engines)
    return state, (paused or why) if state is OrderState.COMES else why


def why_it_waits(update: UpdateRecord | None) -> str | None:
    """What a host whose run is paused there tells its hub: since when, and how it is resumed."""
    if update is None or update.paused_since is None:
        return None
    run, since = update.run, update.paused_since
    return f"updates of {run} are paused on that host since {since}: refitd resume {run} there"


def _of_engines(desired: str, engines: Sequence[EngineRecord]) -> tuple[OrderState, str | None]:
    there = [engine for engine in engines if engine.state is not EngineState.UNREACHABLE]
    if not there:
        why = "it has no engine" if not engines else f"none of its engines answers: {_told(engines[0])}"
        return OrderState.AWAY, why
    if any(each.state.is_loading or each.state in {EngineState.PROBING, EngineState.TAINTED} for each in there):
        return OrderState.COMES, "its engines are being loaded"
    if lost := [engine for engine in there if not engine.known]:
        return OrderState.DOUBTFUL, _told(lost[0])
    if refusing := [engine for engine in there if _refuses(engine, desired)]:
        return OrderState.REFUSED, _told(refusing[0])
    return OrderState.COMES, "its engines are being loaded"


def _refuses(engine: EngineRecord, desired: str) -> bool:
    last = engine.trouble.last_attempt
    failed = last is not None and last.version == desired and last.outcome in _FAILED
    return engine.serving != desired and (failed or engine.state is EngineState.CONTESTED)


def _told(engine: EngineRecord) -> str:
    return f"engine {engine.id} is {engine.state}" + (f": {engine.reason}" if engine.reason else "")


def proof_of_host(
    serves: str | None, engines: Sequence[EngineRecord], fingerprint: Callable[[str, str], str | None]
) -> tuple[str, str | None]:
    """A host's configuration, and its proof: what that is made of, and the digest of its engines' fingerprints. No
    proof where these have none.

    Args:
        serves: the id of the version that it serves; None where that is not proved.
        fingerprint: the one that a version has on a configuration.
    """
    there = [engine for engine in engines if serves is None or engine.serving == serves]
    configurations = sorted({engine.seen.configuration for engine in there if engine.seen.configuration is not None})
    name = _digest(configurations)
    found = [(each, fingerprint(serves, each)) for each in configurations] if serves is not None else []
    counted = [(each, print_) for each, print_ in found if print_ is not None and not print_.startswith(ANSWERED)]
    names = {name for _, print_ in counted for name in names_of_means(print_)}
    made_of = _digest([f"{each} {print_.partition(':')[0]}" for each, print_ in counted])
    proof = f"{BY_HOST}{','.join(sorted(names))}.{made_of}:{_digest([f'{each} {print_}' for each, print_ in counted])}"
    return f"refitd {name}", proof if counted else None


def what_it_does(host: HostEngines | None, ordered: str | None, size: Callable[[str], int | None]) -> str | None:
    """What a host does for its engines now, a sentence without a subject; None where it does nothing.

    Args:
        ordered: the id of the version that it was ordered to serve, while the order is open.
        size: the bytes of a version, None where they are not known.
    """
    if host is None:
        return None
    if host.pulling is not None and host.ahead is not None:
        return f"waits to pull {host.pulling}: {hosts_before(host.ahead)}"
    if host.pulling is not None:
        whole = size(host.pulling)
        of = "" if whole is None else f" of {size_of(whole)}"
        there = f" from {host.source}" if is_bucket_url(host.source) else ""
        return f"pulls {host.pulling}{there} ({size_of(host.pulled_bytes)}{of})"
    if host.loading is not None:
        return f"loads {host.loading}"
    if host.waits is not None:
        return f"waits: {host.waits}" if ordered is None else f"waits to load {ordered}: {host.waits}"
    return None if ordered is None else f"prepares {ordered}: it is pulled and checked there"


def _digest(texts: Sequence[str]) -> str:
    return blake2b("\n".join(texts).encode(), digest_size=12).hexdigest()


def engines_of_host(follower: str, engines: Collection[EngineRecord], waits: str | None = None) -> HostEngines:
    """A host's engines in short, those that need a look first. `waits`: why they are brought to nothing newer."""
    first = sorted(engines, key=lambda each: (each.state.is_loading or each.state is EngineState.IN_SYNC, each.id))
    shown = tuple(
        HostEngine(
            id=engine.id,
            state=engine.state,
            version=engine.serving,
            reason=None if engine.reason is None else engine.reason[:_LONGEST],
            paused=not engine.known or engine.debts.resume_owed,
        )
        for engine in first[:MAX_HOST_ENGINES]
    )
    states = dict(Counter(engine.state for engine in engines))
    return HostEngines(follower=follower, states=states, engines=shown, waits=waits)


ANOTHER = "the upstream has another version of this name"  # why one goes


def is_other(here: VersionRecord | None, digest: str | None) -> bool:
    """Whether a host has another version of a name than its upstream, whose digest this is."""
    if here is None or not here.state.may_have_good_files or here.digest is None:
        return False
    return digest is not None and here.digest != digest


def others_of(offered: Sequence[PullableVersion], here: Mapping[str, VersionRecord]) -> frozenset[str]:
    """The ids of the versions of an upstream of which this host has others."""
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
        engines: those of this host, and those that are named no more and may still read something.
        needed: the ids of what engines here are loaded with, are to serve, or go back to.
    """
    names = {version.id for version in going}
    if pinned := next((version.id for version in going if version.pinned), None):
        return f"{pinned} is pinned here"
    for engine in engines:
        reads = {engine.serving, engine.contents.held, engine.contents.beneath, *engine.debts.unproven}
        if used := next(iter(sorted(name for name in reads if name in names)), None):
            return f"engine {engine.id} serves {used}, or may read it"
    if used := next(iter(sorted(name for name in needed if name is not None and name in names)), None):
        return f"engines here are to serve {used}"
    return None
