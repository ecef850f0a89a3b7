"""Whether a version goes out as a delta, or in full. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Engine

_HOLDS_UP_NOBODY = frozenset({EngineState.UNREACHABLE, EngineState.QUARANTINED, EngineState.CONTESTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRules:
    """When a delta is worth it.

    `threshold` is the share of all elements that it may list: 0.1 of bf16 takes a third of the full version's bytes.
    Every `anchor_every`th version is full, so that a reader who lost everything has few deltas to go through.
    """

    threshold: float = 0.1
    anchor_every: int = 20

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a share that is none, or fewer than one version between anchors.
        """
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}; it is a share of all elements, from 0 to 1")
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every is {self.anchor_every}; 1 makes every version a full one")

    def most(self, elements: int) -> int:
        """How many of so many elements a delta may list. Whoever asks whether it is too much compares with this."""
        return int(self.threshold * elements)


@dataclass(frozen=True, slots=True)
class Full:
    """Publish in full. `why` is a sentence for people."""

    why: str


@dataclass(frozen=True, slots=True)
class FromBase:
    """Publish a delta against version `base`."""

    base: str


def plan_delta(
    base: str | Full, changed: int, since_anchor: int, rules: DeltaRules, *, elements: int
) -> FromBase | Full:
    """Decide.

    Args:
        base: the id of a version that engines serve and all changes since which are known, or why there is none.
        changed: how many elements changed in any version since the base.
        since_anchor: how many versions were published since the last full one.
        rules: when a delta is worth it.
        elements: how many there are.
    """
    if isinstance(base, Full):
        return base
    if since_anchor + 1 >= rules.anchor_every:
        return Full(f"an anchor: {since_anchor} deltas were published since the last full version")
    if changed > rules.most(elements):
        return Full(
            f"{changed / max(1, elements):.2%} of all elements changed since {base}, more than {rules.threshold:.2%}"
        )
    return FromBase(base)


def last_served(engines: Iterable[Engine], run: str) -> str | Full:
    """The id of the oldest version that a run's engines serve, or why there is none to count on.

    A delta that leads from it lists what changed in any version since, so it fits the engines that are further, too.
    """
    counted = [engine for engine in engines if engine.run == run and engine.state not in _HOLDS_UP_NOBODY]
    if not counted:
        return Full(f"no engine of run {run} can be reached")
    found: dict[str, tuple[int, int]] = {}
    for engine in counted:
        parsed = None if engine.version is None else parse_version_id(engine.version)
        if engine.version is None or parsed is None or parsed[0] != run:
            return Full(f"engine {engine.id} serves no version of run {run} yet")
        found[engine.version] = (parsed[1].generation, parsed[1].step)
    return min(found, key=lambda version: found[version])
