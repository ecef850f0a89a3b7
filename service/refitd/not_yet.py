"""What the service says of a version or a run that it does not know: there is none, or it cannot know yet."""

from refitd.ledger import Ledger
from refitd.problem import Kind, ProblemError
from refitd.reclaim.leases import EngineView
from refitd.reclaim.rebuild import unfinished
from refitd.rollout.record import EngineRecord

_AGAIN = {"Retry-After": "1"}  # seconds; listing a root takes less


def waits_for(ledger: Ledger) -> str | None:
    """What the rebuild of the journal still waits for; None where nothing is to be rebuilt, or nothing is missing."""
    if ledger.origin.rebuilt:
        return None
    now = ledger.clock.monotonic()
    engines = [_view(engine, now) for engine in ledger.engines.values()]
    return unfinished(engines, root_fault=ledger.root_fault, fleet_fault=ledger.fleet_fault)


def _view(engine: EngineRecord, now: float) -> EngineView:
    away = 0.0 if engine.unreachable_since is None else now - engine.unreachable_since
    return EngineView(id=engine.id, run=engine.run, state=engine.state, unreachable_for=away)


def why_rebuilding(ledger: Ledger) -> str | None:
    """That a lost journal is being rebuilt, and what for; None where none was lost, or it is rebuilt."""
    if ledger.origin.rebuilt or not ledger.origin.lost:
        return None
    return f"the journal was lost and is being rebuilt: {waits_for(ledger) or 'it is about to be done'}"


def why_not_yet(ledger: Ledger) -> str | None:
    """Why the service cannot say yet which versions there are; None where it can.

    Before the root was listed it knows only what its journal says. A journal that is lost also knew of versions that no
    listing finds: those that were announced with a path of their own.
    """
    return ledger.root_fault or why_rebuilding(ledger)


def unknown(ledger: Ledger, kind: Kind, detail: str) -> ProblemError:
    """The problem to raise for a version or a run that the service does not know.

    Args:
        ledger: what the service knows.
        kind: the problem where there is none.
        detail: what to say then.
    """
    why = why_not_yet(ledger)
    return ProblemError(kind, detail) if why is None else not_ready(why)


def not_ready(why: str) -> ProblemError:
    """The problem to raise while the service cannot know yet. Clients wait and ask again."""
    return ProblemError(Kind.NOT_READY, why, _AGAIN)
