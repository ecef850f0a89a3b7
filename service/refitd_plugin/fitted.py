"""A delta held against what a model holds, before anything is written.

It fits where the model holds what it held when its version was found to be there, that version is the delta's base or
one since, and each changed tensor's fingerprint, less the old elements and plus the new ones, is what the delta
promises.
"""

from dataclasses import dataclass
from typing import Any

from refitd_client.fingerprint.definition import MASK
from refitd_plugin.changes import DeltaChanges
from refitd_plugin.layout import HOLDER, LaidOutDelta, lay
from refitd_plugin.loading import Loading
from refitd_plugin.patch import HostPatch, Patch, Shifts
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.served import MOST_DELTAS, ServedState, leads_from
from refitd_plugin.source import FullNeededError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A delta that fits the `served_state`, as `plan` has laid it. `contents` and `prints` are those that will be."""

    served_state: ServedState
    plan: ReplayPlan
    patch: Patch | None
    contents: dict[str, str]
    prints: list[tuple[str, int]]


def fitted(changes: DeltaChanges, served_state: ServedState | None, loading: Loading) -> Fitted:
    """Hold a delta against what is served.

    Raises:
        FullNeededError: it cannot be applied to that, and a full version can.
        SourceRefusedError: it is none for this model.
    """
    if served_state is None:
        raise FullNeededError("nothing is known of the weights in memory: load a full version")
    _check_order(changes, served_state)
    plan = loading.plan_for_deltas(served_state.source.inventory)
    if isinstance(plan, str):
        raise FullNeededError(f"a delta cannot be translated for this model, {plan}: load a full version")
    _check_unchanged(changes, served_state)
    laid = _laid(changes, served_state, plan, loading)
    holders = loading.derived(plan, served_state.source).holders
    patch = _patch(laid, list(holders.values()))
    shifts = patch.look() if patch is not None else Shifts([], [0] * len(holders))
    return Fitted(
        served_state=served_state,
        plan=plan,
        patch=patch,
        contents={
            name: f"{int(served_state.contents[name], 16) + shift & MASK:016x}"
            for name, shift in zip(holders, shifts.holders, strict=True)
        },
        prints=_results(changes, served_state, laid, shifts),
    )


def _check_order(changes: DeltaChanges, served_state: ServedState) -> None:
    if not leads_from(changes, served_state.label):
        raise FullNeededError(
            f"the delta leads from {changes.base} to {changes.label}, and the engine holds {served_state.label}: "
            "load a full version"
        )
    if len(served_state.followed_by(changes.kept)) > MOST_DELTAS:
        raise FullNeededError(f"there are {MOST_DELTAS} deltas since {served_state.source.label}: load a full version")


def _check_unchanged(changes: DeltaChanges, served_state: ServedState) -> None:
    """What the delta does not name is in memory as its manifest says."""
    expected = changes.manifest.fingerprints
    for name, found in served_state.prints:
        if name not in changes.results and name in expected and int(expected[name], 16) != found:
            raise FullNeededError(f"tensor {name} is not what {changes.label} is made of: load a full version")


def _laid(changes: DeltaChanges, served_state: ServedState, plan: ReplayPlan, loading: Loading) -> LaidOutDelta:
    """As it was laid out while it was read, if that was by this plan."""
    placements = loading.derived(plan, served_state.source).placements
    return (
        changes.laid
        if changes.laid is not None and changes.placements is placements
        else lay(changes.read().changes, placements)
    )


def _patch(laid: LaidOutDelta, holders: list[Any]) -> Patch | None:
    if not laid.names:
        return None
    if not holders[int(laid.groups[0].table[0, HOLDER])].is_cuda:
        return HostPatch(laid, holders)
    from refitd_plugin.device_patch import DevicePatch

    return DevicePatch(laid, holders)


def _results(
    changes: DeltaChanges, served_state: ServedState, laid: LaidOutDelta, shifts: Shifts
) -> list[tuple[str, int]]:
    """The fingerprints of the checkpoint's tensors that will be, which are those that the delta promises."""
    whole: dict[str, list[int]] = {}
    for name, is_whole, shift in zip(laid.names, laid.whole, shifts.pieces, strict=True):
        if is_whole:
            whole.setdefault(name, []).append(shift)
    found: list[tuple[str, int]] = []
    for name, before in served_state.prints:
        after = before + whole[name].pop(0) & MASK if name in whole else before
        if name in whole and after != changes.results[name]:
            raise FullNeededError(
                f"tensor {name} would have fingerprint {after:016x} with the delta, and should have "
                f"{changes.results[name]:016x}: the weights in memory are of another version"
            )
        found.append((name, after))
    return found
