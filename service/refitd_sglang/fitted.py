"""A delta held against what a model holds, before anything is written.

It fits where the model holds what it held when its version was found to be there, that version is the delta's base or
one since, and each changed tensor's fingerprint, less the old elements and plus the new ones, is what the delta
promises.
"""

from dataclasses import dataclass
from typing import Any

from refitd_client.fingerprint.definition import MASK
from refitd_sglang.changes import Changes
from refitd_sglang.laid import HOLDER, Laid, lay
from refitd_sglang.loading import Loading
from refitd_sglang.patch import HostPatch, Patch, Shifts
from refitd_sglang.plan import Plan
from refitd_sglang.source import FullNeededError
from refitd_sglang.standing import MOST_DELTAS, Standing, leads_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A delta that fits what is `standing`, as `plan` has laid it. `contents` and `prints` are those that will be."""

    standing: Standing
    plan: Plan
    patch: Patch | None
    contents: dict[str, str]
    prints: list[tuple[str, int]]


def fitted(changes: Changes, standing: Standing | None, loading: Loading) -> Fitted:
    """Hold a delta against what is served.

    Raises:
        FullNeededError: it cannot be applied to that, and a full version can.
        SourceRefusedError: it is none for this model.
    """
    if standing is None:
        raise FullNeededError("nothing is known of the weights in memory: load a full version")
    _check_order(changes, standing)
    plan = loading.plan_for_deltas(standing.source.inventory)
    if isinstance(plan, str):
        raise FullNeededError(f"a delta cannot be translated for this model, {plan}: load a full version")
    _check_unchanged(changes, standing)
    laid = _laid(changes, standing, plan, loading)
    holders = loading.derived(plan, standing.source).holders
    patch = _patch(laid, list(holders.values()))
    shifts = patch.look() if patch is not None else Shifts([], [0] * len(holders))
    return Fitted(
        standing=standing,
        plan=plan,
        patch=patch,
        contents={
            name: f"{int(standing.contents[name], 16) + shift & MASK:016x}"
            for name, shift in zip(holders, shifts.holders, strict=True)
        },
        prints=_results(changes, standing, laid, shifts),
    )


def _check_order(changes: Changes, standing: Standing) -> None:
    if not leads_from(changes, standing.label):
        raise FullNeededError(
            f"the delta leads from {changes.base} to {changes.label}, and the engine holds {standing.label}: "
            "load a full version"
        )
    if len(standing.followed_by(changes.kept)) > MOST_DELTAS:
        raise FullNeededError(f"there are {MOST_DELTAS} deltas since {standing.source.label}: load a full version")


def _check_unchanged(changes: Changes, standing: Standing) -> None:
    """What the delta does not name is in memory as its manifest says."""
    expected = changes.manifest.fingerprints
    for name, found in standing.prints:
        if name not in changes.results and name in expected and int(expected[name], 16) != found:
            raise FullNeededError(f"tensor {name} is not what {changes.label} is made of: load a full version")


def _laid(changes: Changes, standing: Standing, plan: Plan, loading: Loading) -> Laid:
    """As it was laid out while it was read, if that was by this plan."""
    ways = loading.derived(plan, standing.source).ways
    return changes.laid if changes.laid is not None and changes.ways is ways else lay(changes.read().changes, ways)


def _patch(laid: Laid, holders: list[Any]) -> Patch | None:
    if not laid.names:
        return None
    if not holders[int(laid.groups[0].table[0, HOLDER])].is_cuda:
        return HostPatch(laid, holders)
    from refitd_sglang.device_patch import DevicePatch

    return DevicePatch(laid, holders)


def _results(changes: Changes, standing: Standing, laid: Laid, shifts: Shifts) -> list[tuple[str, int]]:
    """The fingerprints of the checkpoint's tensors that will be, which are those that the delta promises."""
    whole: dict[str, list[int]] = {}
    for name, is_whole, shift in zip(laid.names, laid.whole, shifts.pieces, strict=True):
        if is_whole:
            whole.setdefault(name, []).append(shift)
    found: list[tuple[str, int]] = []
    for name, before in standing.prints:
        after = before + whole[name].pop(0) & MASK if name in whole else before
        if name in whole and after != changes.results[name]:
            raise FullNeededError(
                f"tensor {name} would have fingerprint {after:016x} with the delta, and should have "
                f"{changes.results[name]:016x}: the weights in memory are of another version"
            )
        found.append((name, after))
    return found
