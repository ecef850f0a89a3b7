"""Delta chains: what a delta stands on, and the deltas that lead an engine to it. Pure.

    v1 full ← v2 ← v3 ← v5         each arrow is a base. The chain of v5 is v1, v2, v3, v5

A delta lists what changed in any version since its base. So it leads to its version from the base and from each version
in between. An engine with refitd's plugin writes the deltas themselves, and from its start-up weights first the full
version:

    serves v2, wanted v5 on v4 on v2      v4, then v5
    restarted, wanted v5 on v4 on v2      v2, then v4, then v5

An engine whose plugin needs a full version gets the copy that engines without the plugin get, until the plugin has
loaded a full version again. So does an engine with unknown contents, and one whose chain has a barred version.

A load leaves alone the tensors that a version leaves out: they stay the start-up model's. So such a version may go to
an
engine that was never loaded since it started, or only with versions that leave out the same. Else it would keep tensors
of another version, beside engines that were restarted: it stays on what it serves until it is restarted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import Kind, VersionState


@dataclass(frozen=True, slots=True)
class NoBase:
    """Why a delta has nothing to lead from. `final` is False while that may change."""

    reason: str
    final: bool


def base_of(delta: VersionRecord, versions: Mapping[str, VersionRecord], *, gone: bool) -> VersionRecord | NoBase:
    """The base of a delta, if it is known and good. `gone`: it was there once, and was deleted."""
    name, base = delta.base or "", versions.get(delta.base or "")
    if base is None and not gone:
        return NoBase(f"its base {name} has not been seen yet", final=False)
    if base is None or base.state.is_over:
        return NoBase(f"its base {name} was deleted: publish in full", final=True)
    if base.run != delta.run or base.order >= delta.order:
        return NoBase(f"its base {name} is no earlier version of run {delta.run}: publish in full", final=True)
    if base.state.is_open:
        return NoBase(f"its base {name} is {base.state}: it has no verdict yet", final=False)
    if base.state is not VersionState.SEALED:
        return NoBase(f"its base {name} is {base.state} ({base.reason}): publish in full", final=True)
    return base


def chain_of(version: VersionRecord, versions: Mapping[str, VersionRecord]) -> tuple[VersionRecord, ...] | NoBase:
    """A version and all that it stands on, the full one first; each is SEALED, but for the version itself."""
    chain = [version]
    while chain[0].kind is Kind.DELTA:
        base = base_of(chain[0], versions, gone=chain[0].base not in versions)
        if isinstance(base, NoBase):
            return base if chain[0] is version else NoBase(f"of {chain[0].id}, {base.reason}", base.final)
        chain.insert(0, base)  # orders go down, so this ends
    return tuple(chain)


def way_from(
    start: Order, target: VersionRecord, versions: Mapping[str, VersionRecord]
) -> tuple[VersionRecord, ...] | None:
    """The deltas that lead from a version of the target's run to the target, in order; None where there are none.

    What is at the start need not be on disk any more, nor be known.
    """
    way: list[VersionRecord] = []
    link: VersionRecord | None = target
    while link is not None and link.kind is Kind.DELTA and (link is target or link.state is VersionState.SEALED):
        way.insert(0, link)
        base = parse_version_id(link.base or "")
        if base is None or base[0] != target.run or base[1] >= link.order:
            return None
        # Versions of another generation were published by a trainer that knew nothing of these.
        if base[1] <= start < link.order and base[1].generation == start.generation:
            return tuple(way)
        link = versions.get(link.base or "")
    return None


Versions = Mapping[str, VersionRecord]


def takes_in_place(engine: EngineRecord, version: VersionRecord, versions: Versions) -> bool:
    if engine.pulls:
        return version.kind is Kind.DELTA
    serving = _serving(engine, version.run, versions)
    if not _takes_deltas(engine) or version.kind is not Kind.DELTA or serving is None:
        return False
    return way_from(serving.order, version, versions) == (version,)


def step_in_place(engine: EngineRecord, wanted: VersionRecord, versions: Versions) -> VersionRecord | None:
    """What the engine loads next on its way to a delta; None where it cannot get there without a copy. A host pulls a
    delta with what it stands on, and needs no steps.
    """
    if engine.pulls:
        return wanted if wanted.kind is Kind.DELTA and engine.serving != wanted.id else None
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


def needs_copy(engine: EngineRecord, wanted: VersionRecord, versions: Versions, *, ordered: bool = False) -> bool:
    """Whether the engine can be brought to a delta by a copy only.

    False for an engine that was never reached, and for one that is ahead, with a version from its trainer's memory.

    Args:
        ordered: an upstream has ordered it, so that engines which are ahead go back to it.
    """
    if engine.seen.configuration is None or engine.serving == wanted.id:
        return False
    if engine.known and not ordered and is_past(engine, wanted, versions):
        return False
    return step_in_place(engine, wanted, versions) is None


def is_past(engine: EngineRecord, version: VersionRecord, versions: Versions) -> bool:
    """Whether an engine serves this version or a newer one of its run, and nothing that was rolled back from."""
    serving = _serving(engine, version.run, versions)
    if serving is None or serving.barred:
        return False
    return serving.order >= version.order


def _serving(engine: EngineRecord, run: str, versions: Versions) -> VersionRecord | None:
    serving = versions.get(engine.serving or "")
    return serving if serving is not None and serving.run == run else None


def _takes_deltas(engine: EngineRecord) -> bool:
    return engine.seen.plugin is not None and engine.known and not engine.contents.wants_full


NOTHING = ""
"""Of the start-up weights nothing is left, as far as is known."""


def why_not_over(engine: EngineRecord, version: VersionRecord, versions: Mapping[str, VersionRecord]) -> str | None:
    """Why an engine may not load a version over what it has; None where it may. A host asks this of its own engines."""
    if not version.files.lacks or engine.pulls or _kept(engine, versions) in {None, version.files.lacks}:
        return None
    return f"{version.id} {version.partly}, and this engine has others since a load before: restart it"


def begun(engine: EngineRecord, version: VersionRecord) -> EngineRecord:
    """The record of an engine that a version is about to be loaded into."""
    return engine.having(kept=version.files.lacks)


def _kept(engine: EngineRecord, versions: Mapping[str, VersionRecord]) -> str | None:
    if engine.contents.kept is not None:
        return engine.contents.kept
    loaded = engine.serving or engine.contents.held  # by an earlier release, which did not write down what is kept
    if loaded is not None:
        return versions[loaded].files.lacks if loaded in versions else NOTHING
    is_elsewhere = engine.seen.startup_path is not None and engine.contents.model_path not in {
        None,
        engine.seen.startup_path,
    }
    return NOTHING if is_elsewhere else None
