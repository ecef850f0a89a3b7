"""What a delta stands on: its base, the base's base, down to a full version. Pure.

    v1 full ← v2 ← v3 ← v5         each arrow is a base. The chain of v5 is v1, v2, v3, v5

A delta lists what changed in any version since its base. So it leads to its version from the base, and from each
version in between; whoever is further on passes the first links of a chain by.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.states import Kind, VersionState

_OVER = frozenset({VersionState.RETIRED, VersionState.DELETED})


@dataclass(frozen=True, slots=True)
class NoBase:
    """Why a delta has nothing to lead from; `reason` is a sentence. `final` is False while that may change."""

    reason: str
    final: bool


def base_of(delta: VersionRecord, versions: Mapping[str, VersionRecord], *, gone: bool) -> VersionRecord | NoBase:
    """The base of a delta, if it is known and good. `gone`: it was there once, and was deleted."""
    name, base = delta.base or "", versions.get(delta.base or "")
    if base is None and not gone:
        return NoBase(f"its base {name} has not been seen yet", final=False)
    if base is None or base.state in _OVER:
        return NoBase(f"its base {name} was deleted: publish in full", final=True)
    if base.run != delta.run or base.order >= delta.order:
        return NoBase(f"its base {name} is no earlier version of run {delta.run}: publish in full", final=True)
    if base.state.is_open:
        return NoBase(f"its base {name} is {base.state}: nobody knows yet whether it is good", final=False)
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
