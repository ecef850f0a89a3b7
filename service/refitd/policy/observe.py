"""What a probe or a refit shows about an engine. Pure: the record before and what was seen in, the record after out.

What the version's own files prove decides: the plugin holds an engine's tensors against them. Where nothing proves
them, each engine is one witness, and none is believed because it was heard first:

- What at least two engines give, and more than give anything else, is right. Engines that give something else are
  loaded again, held against that, and quarantined if they give it again.
- Where no fingerprint has that, engines contradict each other: none is paused, the version is not served, and the run
  is TROUBLED until another engine decides, or a load of one of them agrees.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from refitd.engine.fingerprints import BY_PLUGIN, CONTRADICTED, agree, comparable, means_of, proof_by, uncompared
from refitd.engine.port import Outcome, Process, Reached, Refit, Unreached
from refitd.policy.contest import calmed, changed, forgiven, held, refused, still_changed
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState


def agreed(given: Iterable[str]) -> str | None:
    """The fingerprint that at least two engines give, and more than give any other; None where there is none."""
    counts: dict[str, int] = {}
    for each in given:
        counts[each] = counts.get(each, 0) + 1
    most = max(counts.values(), default=0)
    found = [each for each, count in counts.items() if count == most]
    return found[0] if most > 1 and len(found) == 1 else None


def believed(recorded: str | None, given: Mapping[str, str], name: str) -> str | None:
    """What a load is held against before the engine is resumed; None where one other engine alone has given it.

    Args:
        given: by their ids, what engines of the configuration have given.
    """
    if recorded is None or recorded.startswith(BY_PLUGIN) or not given or given == {name: recorded}:
        return recorded
    return recorded if agreed(given.values()) == recorded else None


def contradicts(name: str, given: Mapping[str, str]) -> str | None:
    """Whom an engine contradicts while nobody is believed, in a sentence; None where it contradicts nobody."""
    others = sorted(each for each, found in given.items() if found != given.get(name))
    if name not in given or not others or agreed(given.values()) is not None:
        return None
    return f"its contents are not those of {listed(others)}, and nothing says which are right"


def doubted(engine: EngineRecord, given: Mapping[str, str]) -> EngineRecord:
    """The record of an engine with whom it contradicts; unchanged but for an earlier contradiction where nobody.

    Args:
        given: by their ids, what engines of its configuration have given for the version that it serves.
    """
    doubt, found = contradicts(engine.id, given), given[engine.id]
    if doubt is not None:
        return engine.having(contradiction=doubt, proof=f"{proof_by(found)} ({CONTRADICTED})", reason=doubt)
    return engine if engine.contents.contradiction is None else engine.having(contradiction=None, proof=proof_by(found))


def judged(engine: EngineRecord, version: str, given: Mapping[str, str], *, was: str | None) -> EngineRecord:
    """The record of an engine after another one of its configuration has said what it holds.

    Args:
        given: by their ids, what engines have given for the version.
        was: the fingerprint that was believed before; None where none was.
    """
    right, found = agreed(given.values()), given[engine.id]
    if engine.state.stays_paused and found == right != was:
        strikes = {name: count for name, count in engine.trouble.strikes.items() if name != version}
        reason = f"most engines hold of {version} what it has loaded: it is loaded again"
        return engine.having(state=EngineState.TAINTED, taints=0, failures=0, strikes=strikes, reason=reason)
    if not engine.known or engine.serving != version or not engine.state.is_at_rest:
        return engine
    if right is not None and found != right:
        reason = f"its contents are not those of {version} that most engines hold"
        state = EngineState.BEHIND
        return engine.having(state=state, serving=None, proof=None, contradiction=None, reason=reason)
    return doubted(engine, given)


QUARANTINE_AFTER = 4  # loads in a row that left unknown contents: the first, and three repairs
REMEMBERED_STRIKES = 8  # versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    path: str
    label: str


def after_probe(
    engine: EngineRecord,
    seen: Reached | Unreached,
    expected: Expected | None,
    target: str | None,
    now: float,
    *,
    interval: float = 2.0,
    twin: str | None = None,
    told: VersionRecord | None = None,
) -> EngineRecord:
    """The record after a probe.

    Args:
        expected: the path and the label that belong to `engine.serving`.
        interval: seconds from one probe to the next.
        twin: which other entry names the same server and loads it.
        told: what a host proves that it serves; None where that is not known here.
    """
    if isinstance(seen, Unreached):
        if seen.is_awaited and engine.state is EngineState.PROBING:
            return engine.having(reason=seen.reason)
        since = engine.trouble.unreachable_since if engine.trouble.unreachable_since is not None else now
        return engine.having(state=EngineState.UNREACHABLE, reason=seen.reason, unreachable_since=since)
    if expected is not None:
        seen = seen.expecting(expected.path, expected.label)
    before, moved = engine, engine.contents.model_path not in {None, seen.model_path}
    engine = after_word(engine, seen.host)
    was_away = engine.known and engine.state.is_away
    engine = engine.having(
        reason=None if was_away else engine.reason,
        unreachable_since=None,
        weight_version=seen.weight_version,
        model_path=seen.model_path,
        named_before=None,
        may_read=_readable(engine, seen) if seen.process.is_as(engine.process) is not False else seen.may_read,
        given=_comparable(engine, seen.configuration),
        seen=replace(seen.told_of_server, startup_path=seen.startup_path or engine.seen.startup_path),
        process=_process(engine.process, seen.process),
        address=seen.address,
        taken=twin or seen.led_by,
        kept=None if seen.process.is_as(engine.process) is False else engine.contents.kept,
    )
    if not engine.known:
        return _doubtful(before, engine, seen, moved=moved)
    named, named_before = (
        (seen.model_path, seen.weight_version),
        (before.contents.model_path, before.contents.weight_version),
    )
    obeyed = _carried_out(before, seen)
    if obeyed is not None or _is_ahead(before, seen, told):
        engine = engine.having(serving=seen.serves, proof=None, beneath=None, wants_full=False, failures=0)
        engine = engine.having(reason=None, contest=None, contests=0, contested_at=None)
        engine = engine.having(last_attempt=obeyed or engine.trouble.last_attempt)
    elif engine.serving is not None and (expected is None or named != (expected.path, expected.label)):
        engine = changed(before, engine, seen, None if expected is None else expected.path, now)
    elif engine.trouble.contest is not None:
        engine = still_changed(before, engine, seen)
    elif before.serving is None and before.contents.model_path is not None and named != named_before:
        # This service has never loaded it, and it names something else than at the last probe.
        engine = changed(before, engine, seen, before.contents.model_path, now)
    else:
        engine = calmed(engine, now, interval)
    return held(standing(_ordered_elsewhere(engine, seen, target), target), target, now, interval)


def after_word(engine: EngineRecord, host: HostEngines | None) -> EngineRecord:
    """The record after a host has said how its engines are, in a probe or while it carries out an order."""
    is_mended = _given_up(engine.seen.host) > _given_up(host) == 0
    return engine.having(host=host, strikes={} if is_mended else engine.trouble.strikes)


def _ordered_elsewhere(engine: EngineRecord, seen: Reached, target: str | None) -> EngineRecord:
    """A host that has obeyed an order which came late, and is not to go there, is to be ordered again."""
    if target is None or seen.desires in {None, seen.serves, target}:
        return engine
    return engine.having(reload=True, reason=f"it has obeyed an order to serve {seen.desires}, and is not to go there")


def _given_up(host: HostEngines | None) -> int:
    """How many engines of a host load nothing more until they are restarted. While there are some, the host refuses
    versions that say nothing against them: those are tried again when there are none.
    """
    return 0 if host is None else host.states.get(EngineState.QUARANTINED, 0)


def _carried_out(engine: EngineRecord, seen: Reached) -> AttemptRecord | None:
    """The last order as carried out, where a host proves it and was silent, or did not obey it, before; else None.

    The host is not ordered back then, and is mended there when an engine of it is restarted later.
    """
    last = engine.trouble.last_attempt
    if last is None or seen.serves is None or engine.serving == seen.serves:
        return None
    if last.version != seen.serves or last.outcome not in {Outcome.UNREACHABLE.name, Outcome.NACK.name}:
        return None
    heard = "the host was found later to have carried it out"
    return replace(last, outcome=Outcome.ACK.name, reason=heard)


def _is_ahead(engine: EngineRecord, seen: Reached, told: VersionRecord | None) -> bool:
    """Whether a host proves something newer than all that this service has brought it to, and that is good here: this
    service was restored from a backup, or knows the host no more. The host is not ordered back then.
    """
    if not seen.pulls or told is None or not told.state.may_be_target or told.barred:
        return False
    last = None if engine.trouble.last_attempt is None else engine.trouble.last_attempt.version
    known = (parse_version_id(id_) for id_ in (engine.serving, engine.contents.held, last) if id_ is not None)
    return all(at is None or at[0] != told.run or at[1] < told.order for at in known)


def compared(engine: EngineRecord, recorded: str | None, found: str | None, target: str | None) -> EngineRecord:
    """The record of an engine that was away, after its contents were compared.

    Args:
        recorded: the fingerprint that a clean load of what it serves gave; None where none is recorded.
        found: the fingerprint that it has; None where it cannot be told.
    """
    if engine.pulls and recorded is not None and found is not None and not comparable(found, recorded):
        return engine.having(proof=uncompared(found))
    if recorded is None or found == recorded:  # where there is a record, an answer that is lost proves nothing
        first = proof_by(recorded, recorded=True)  # where this engine gave the record, it agrees with itself
        return engine.having(proof=first if engine.contents.proof == first else proof_by(recorded))
    reason = f"its contents are not those of {engine.serving}, whatever its label says"
    return standing(engine.having(serving=None, reason=reason), target)


def proved(
    engine: EngineRecord,
    found: str,
    recorded: str | None,
    given: Mapping[str, str] | None = None,
    *,
    again: bool = False,
) -> EngineRecord:
    """The record of an engine whose load went well, held against what is on record by now.

    Its adapter has compared it with nothing where one other engine alone has given the record, or none had yet. Where
    they
    differ, this one is loaded once more; where they differ again, they contradict each other.

    Args:
        recorded: the one that is on record; None where there is none.
        given: by their ids, what engines gave for the version, this one among them; None: what is recorded.
        again: whether this engine has given a fingerprint of this version before.
    """
    if recorded is None:
        return engine.having(proof=proof_by(found, recorded=True))
    same = agree(found, recorded)
    if same is None:
        is_left_to_its_adapter = means_of(found) == means_of(recorded)
        return engine if is_left_to_its_adapter else engine.having(proof=uncompared(found))
    heard = {"": recorded, engine.id: found} if given is None else given
    right = agreed(heard.values())
    if right == found or set(heard.values()) == {found}:  # where nobody else holds what is on record, it gives that
        return engine.having(proof=proof_by(found, recorded=right is None and not same))
    if right is None and again:
        return doubted(engine, heard)
    reason = f"its contents are not those that another load of {engine.serving} gave"
    return engine.having(serving=None, proof=None, reason=reason)


def _comparable(engine: EngineRecord, configuration: str | None) -> dict[str, str]:
    """What it gave as a witness; nothing where its configuration is another one now."""
    return engine.contents.given if configuration == engine.seen.configuration else {}


def _readable(engine: EngineRecord, told: Reached | Refit) -> tuple[str, ...]:
    before = engine.debts.may_read if told.may_read_more else ()
    return tuple(dict.fromkeys((*told.may_read, *before)))


def _doubtful(before: EngineRecord, engine: EngineRecord, seen: Reached, *, moved: bool) -> EngineRecord:
    """The record of an engine whose contents stay unknown. An engine that was given up is tried again when it was away
    or
    restarted, or names another model. That it names its start-up model proves nothing: a failed load changes no name.
    """
    restarted = seen.process.is_as(before.process) is False
    if engine.state is EngineState.QUARANTINED and not moved and not restarted:
        return engine
    if restarted or engine.state in {EngineState.QUARANTINED, EngineState.UNREACHABLE}:
        # Why it was given up or did not answer is over.
        since = "it was restarted since" if restarted else "it has answered again since"
        reason = f"a load left its contents unknown, and {since}: it is loaded again"
        engine = forgiven(engine.having(taints=0, reason=reason))
    return replace(engine, state=EngineState.TAINTED)


def _process(known: Process, told: Process) -> Process:
    """What is known of the process now: a process that tells less for a moment is the one that told more."""
    if told.is_as(known) is False:
        return told
    return Process(seed=known.seed if told.seed is None else told.seed, started=told.started or known.started)


def standing(engine: EngineRecord, target: str | None) -> EngineRecord:
    """Put an engine with known contents where it stands towards the target."""
    if engine.run is None:
        return replace(engine, state=EngineState.IN_SYNC)  # the controller says why
    if target is None or (engine.serving == target and not engine.debts.reload):
        is_elsewhere = (
            engine.seen.host is not None and engine.seen.host.unknown is not None
        )  # what it has is said of the host
        reason = engine.doubted if engine.serving or is_elsewhere else "no version to serve yet"
        return engine.having(state=EngineState.IN_SYNC, reason=reason)
    if engine.state is EngineState.NACKED:
        return engine
    return replace(engine, state=EngineState.BEHIND)


def after_refit(engine: EngineRecord, version: str, refit: Refit, now: float) -> EngineRecord:
    failed = engine.having(failures=engine.trouble.failures + 1, reason=refit.reason)
    match refit.outcome:
        case Outcome.ACK:
            return engine.having(
                state=EngineState.IN_SYNC if refit.resumed else EngineState.PROBING,
                serving=version,
                proof=proof_by(refit.fingerprint, recorded=refit.recorded),
                configuration=refit.configuration or engine.seen.configuration,
                given=_comparable(engine, refit.configuration or engine.seen.configuration),
                may_read=_readable(engine, refit),
                held=None,
                known=True,
                reload=False,
                contest=None,
                contradiction=None,
                named_before=None,
                unproven=(),  # loads do not overlap in a server: one that was proved to end proves the earlier ones too
                resume_owed=not refit.resumed,
                failures=0,
                taints=0,
                strikes={name: count for name, count in engine.trouble.strikes.items() if name != version},
                reason=None,
                unreachable_since=None,
            )
        case Outcome.NACK if refit.led:
            engine = refused(engine, refit.reason or "another service leads it", now)
            state = EngineState.CONTESTED if engine.known else EngineState.TAINTED
            # A host is told again and again, later each time.
            failures = engine.trouble.failures + (1 if engine.pulls and not engine.known else 0)
            owed = engine.known and not refit.resumed
            return engine.having(state=state, reason=refit.reason, failures=failures, resume_owed=owed)
        case Outcome.NACK if refit.needs_full:
            owed = not refit.resumed
            return engine.having(state=EngineState.BEHIND, wants_full=True, reason=refit.reason, resume_owed=owed)
        case Outcome.NACK if refit.waits and engine.known:  # what it waits for its host tells
            return engine.having(state=EngineState.BEHIND, reason=None, reload=False)
        case Outcome.NACK if refit.waits:
            return replace(failed, state=EngineState.TAINTED)
        case Outcome.NACK:
            return failed.having(state=EngineState.NACKED, resume_owed=not refit.resumed)
        case Outcome.TAINTED:
            taints = engine.trouble.taints + 1
            return failed.having(
                state=EngineState.QUARANTINED if taints >= QUARANTINE_AFTER else EngineState.TAINTED,
                serving=None,
                held=None,
                known=False,
                resume_owed=False,
                beneath=None,
                model_path=None,  # nor is it known which model it names from now on: this one or that before
                named_before=engine.contents.model_path or engine.debts.named_before,
                weight_version=None,
                taints=taints,
                strikes=engine.trouble.strikes if refit.overwritten else _struck(engine.trouble.strikes, version),
                unproven=(*(each for each in engine.debts.unproven if each != version), version),
            )
        case Outcome.UNREACHABLE:
            since = engine.trouble.unreachable_since if engine.trouble.unreachable_since is not None else now
            return failed.having(
                state=EngineState.UNREACHABLE,
                unreachable_since=since,
                # "Resumed" may mean that nothing was sent: that pays no older debt.
                resume_owed=engine.known and (engine.debts.resume_owed or not refit.resumed),
            )


def refit_at_stop(engine: EngineRecord) -> Refit:
    """How a load ended in the middle of which the service was stopped. A host goes on by itself."""
    if engine.pulls:
        return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason="the service was stopped while the host loaded")
    return Refit(outcome=Outcome.TAINTED, resumed=False, reason="the service was stopped in mid-update")


def _struck(strikes: dict[str, int], version: str) -> dict[str, int]:
    others = [(name, count) for name, count in strikes.items() if name != version]
    return dict([*others[-REMEMBERED_STRIKES + 1 :], (version, strikes.get(version, 0) + 1)])
