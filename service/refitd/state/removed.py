"""What outlives that an engine is named no more. Pure.

Who takes an engine out of a file, or a DNS that leaves out a pod that is not ready, stops no load. Where nobody knows
what a server holds, or whether it reads on, that stays known of its address: its versions are not written over, and an
engine that is named there again is loaded and proved before it is told to go on.
"""

from dataclasses import replace

from refitd.state.records import EngineRecord
from refitd_client.contract.states import EngineState


def in_mid_load(engine: EngineRecord, version: str) -> EngineRecord:
    """An engine that is taken out while it loads: until the load has ended nobody knows what it holds."""
    return _doubted(engine, (version,), f"it was removed in the middle of loading {version}")


def left_behind(engine: EngineRecord, now: float) -> EngineRecord | None:
    """What stays known of an address; None where all of it ends with the engine. `now` is of the monotonic clock."""
    if engine.known and not engine.unproven:
        return None
    return replace(
        engine, id=engine.url, removed=True, state=EngineState.UNREACHABLE, resume_owed=False, unreachable_since=now
    )


def given_back(engine: EngineRecord, removed: EngineRecord | None) -> EngineRecord:
    """An engine that is named, with what is known of its address. It was away: it is tried like one that was."""
    return engine if removed is None else _doubted(engine, removed.unproven, removed.reason)


def _doubted(engine: EngineRecord, versions: tuple[str, ...], reason: str | None) -> EngineRecord:
    unproven = (*engine.unproven, *(version for version in versions if version not in engine.unproven))
    return replace(engine, known=False, serving=None, unproven=unproven, reason=reason)
