"""Deltas in engines that have refitd's plugin: which they take as they are, and the way there. Pure.

Such an engine is given the delta itself and writes what changed. It is brought to a delta that does not lead from what
it serves by those in between, and from its start-up weights by the full version that they all stand on:

    serves v2, wanted v5 on v4 on v2      v4, then v5
    restarted, wanted v5 on v4 on v2      v2, then v4, then v5

One that answers that it needs a full version gets the copy that engines without the plugin get, until it was given a
full version by way of the plugin again. So do one with unknown contents, and one whose way leads through a version that
was rolled back from.
"""

from collections.abc import Mapping

from refitd.policy.chain import NoBase, chain_of, way_from
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind

Versions = Mapping[str, VersionRecord]


def takes_in_place(engine: EngineRecord, version: VersionRecord, versions: Versions) -> bool:
    """Whether a delta is written into what the engine serves now."""
    serving = _serving(engine, version.run, versions)
    if not _takes_deltas(engine) or version.kind is not Kind.DELTA or serving is None:
        return False
    return way_from(serving.order, version, versions) == (version,)


def step_in_place(engine: EngineRecord, wanted: VersionRecord, versions: Versions) -> VersionRecord | None:
    """What the engine loads next on its way to a delta; None where it cannot get there without a copy."""
    if not _takes_deltas(engine) or wanted.kind is not Kind.DELTA or engine.serving == wanted.id:
        return None
    serving = _serving(engine, wanted.run, versions)
    way = None if serving is None else way_from(serving.order, wanted, versions)
    if not way:
        chain = chain_of(wanted, versions)
        if isinstance(chain, NoBase) or (serving is not None and serving.order >= chain[0].order):
            return None
        way = chain
    return None if any(step.barred for step in way) else way[0]


def needs_copy(engine: EngineRecord, wanted: VersionRecord, versions: Versions) -> bool:
    """Whether the engine can be brought to a delta by a copy only. Of one that was never reached nobody knows, and one
    that is ahead, with what it took from its trainer's memory, is not brought back to it.
    """
    if engine.configuration is None or engine.serving == wanted.id:
        return False
    if engine.known and is_past(engine, wanted, versions):
        return False
    return step_in_place(engine, wanted, versions) is None


def is_past(engine: EngineRecord, version: VersionRecord, versions: Versions) -> bool:
    """Whether an engine serves this version or a newer one of its run, and nothing that was rolled back from."""
    serving = _serving(engine, version.run, versions)
    if serving is None or serving.barred:
        return False
    return serving.order >= version.order


def _serving(engine: EngineRecord, run: str, versions: Versions) -> VersionRecord | None:
    """What it serves of a run. One that came from another run serves nothing that a delta of this one leads from."""
    serving = versions.get(engine.serving or "")
    return serving if serving is not None and serving.run == run else None


def _takes_deltas(engine: EngineRecord) -> bool:
    return engine.plugin is not None and engine.known and not engine.wants_full
