"""Which contents of a version are right, where engines give different fingerprints of it. Pure.

What the version's own files prove decides: the plugin holds an engine's tensors against them. Where nothing proves
them, each engine is one witness, and none of them is believed because it was heard first:

- What at least two engines give, and more than give anything else, is right. Engines that give something else are
  loaded again, held against that, and quarantined if they give it again.
- Where no fingerprint has that, engines contradict each other: none is paused, the version is not served, and the run
  is TROUBLED until another engine decides, or a load of one of them agrees.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from refitd.engine.fingerprints import BY_PLUGIN, CONTRADICTED, proof_by
from refitd.state.records import EngineRecord
from refitd.text import listed
from refitd_client.contract.states import EngineState


def agreed(given: Iterable[str]) -> str | None:
    """The fingerprint that at least two engines give, and more than give any other; None where there is none.

    Args:
        given: the fingerprint of each engine.
    """
    counts: dict[str, int] = {}
    for each in given:
        counts[each] = counts.get(each, 0) + 1
    most = max(counts.values(), default=0)
    found = [each for each, count in counts.items() if count == most]
    return found[0] if most > 1 and len(found) == 1 else None


def believed(recorded: str | None, given: Mapping[str, str], name: str) -> str | None:
    """What a load is held against before the engine is resumed; None where one other engine alone has given it.

    Args:
        recorded: the fingerprint that is on record.
        given: by their ids, what engines of the configuration have given.
        name: the id of the engine that loads.
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
        engine: the engine, one of those in `given`.
        given: by their ids, what engines of its configuration have given for the version that it serves.
    """
    doubt, found = contradicts(engine.id, given), given[engine.id]
    if doubt is not None:
        return replace(engine, contradiction=doubt, proof=f"{proof_by(found)} ({CONTRADICTED})", reason=doubt)
    return engine if engine.contradiction is None else replace(engine, contradiction=None, proof=proof_by(found))


def judged(engine: EngineRecord, version: str, given: Mapping[str, str], *, was: str | None) -> EngineRecord:
    """The record of an engine after another one of its configuration has said what it holds.

    Args:
        engine: the engine, one of those in `given`.
        version: the id of the version that is spoken of.
        given: by their ids, what engines have given for the version.
        was: the fingerprint that was believed before; None where none was.
    """
    right, found = agreed(given.values()), given[engine.id]
    if engine.state.stays_paused and found == right != was:
        strikes = {name: count for name, count in engine.strikes.items() if name != version}
        reason = f"most engines hold of {version} what it has loaded: it is loaded again"
        return replace(engine, state=EngineState.TAINTED, taints=0, failures=0, strikes=strikes, reason=reason)
    if not engine.known or engine.serving != version or not engine.state.is_at_rest:
        return engine
    if right is not None and found != right:
        reason = f"its contents are not those of {version} that most engines hold"
        state = EngineState.BEHIND
        return replace(engine, state=state, serving=None, proof=None, contradiction=None, reason=reason)
    return doubted(engine, given)
