"""Who reads a copy, or may be reading it. Pure.

A copy is written in place, so being nearly sure is not enough: an engine that cannot be reached, a load that nobody
heard the end of, a server that names the copy's folder as its model all count, for ever. Whoever has a deleted file
open reads on undisturbed, though: for taking a copy away, the rules are those for versions (`refitd.policy.leases`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from refitd.policy.leases import DEAD_AFTER, EngineView, Lease, LeaseKind, Views, leases
from refitd.state.copy import Copy
from refitd_client.contract.states import EngineState

_READS = frozenset({LeaseKind.SERVING, LeaseKind.LOADING, LeaseKind.UNPROVEN})
_HOLDS_UP_NOBODY = frozenset({EngineState.UNREACHABLE, EngineState.QUARANTINED, EngineState.CONTESTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """`reads` says in sentences who may read a copy: while there is one, it is not written.

    `is_waited_for` is False where all of them are engines that hold up nobody. `holders` are their ids. `may_go`: it
    can be deleted.
    """

    reads: tuple[str, ...] = ()
    is_waited_for: bool = False
    holders: frozenset[str] = frozenset()
    may_go: bool = True


def readers_of(copies: Sequence[Copy], views: Views, paths: Mapping[str, Sequence[str]]) -> dict[str, Readers]:
    """The readers of each copy, by its name. `paths` are those that engines may name, by their ids."""
    for_ever, as_versions = leases(views, dead_after=float("inf")), leases(views)
    engines = {engine.id: engine for engine in views.engines}
    found: dict[str, Readers] = {}
    for copy in copies:
        version = copy.holds or copy.read_as or ""
        held = [lease for lease in for_ever.get(version, ()) if lease.kind in _READS]
        naming = [engines[name] for name in _naming(copy, paths) if name in engines]
        kept = [lease for lease in as_versions.get(version, ()) if lease.kind in _READS]
        found[copy.name] = Readers(
            reads=tuple(_sentences(held, naming)),
            is_waited_for=any(_counts(engines.get(lease.holder)) for lease in held) or any(map(_counts, naming)),
            holders=frozenset([lease.holder for lease in held] + [engine.id for engine in naming]),
            may_go=not kept and all(engine.unreachable_for >= DEAD_AFTER for engine in naming),
        )
    return found


def _naming(copy: Copy, paths: Mapping[str, Sequence[str]]) -> list[str]:
    """An engine may see the root elsewhere, so the path's end counts."""
    end = copy.path if copy.path.startswith("/") else f"/{copy.path}"
    return [name for name, named in paths.items() if any(path.endswith(end) for path in named)]


def _sentences(held: Sequence[Lease], naming: Sequence[EngineView]) -> Iterator[str]:
    yield from map(str, held)
    told = {lease.holder for lease in held}
    for engine in naming:
        if engine.id not in told:
            yield f"engine {engine.id} names its folder as what it serves, and may read it again"


def _counts(engine: EngineView | None) -> bool:
    """One that was let go of in mid-load is in no fleet, but it reads: that ends."""
    return engine is None or engine.state not in _HOLDS_UP_NOBODY
