"""A delta on its way into a model, in place.

It is known before the first write that the delta fits: the model holds what it held when its version was found to be
there, that version is the delta's base or one since, and each changed tensor's fingerprint, less the old elements and
plus the new ones, is the one that the delta promises. After the last write the model's tensors have the fingerprints
that follow.

Where a delta cannot be translated (a loader computes the tensor, or no load has shown yet how it is loaded) the rank
asks for a full version.
"""

from dataclasses import dataclass
from typing import Any

from refitd_client.fingerprint.host import MASK
from refitd_client.validation.examine import signature
from refitd_plugin.changes import DeltaChanges
from refitd_plugin.engine_slices import SliceCheck
from refitd_plugin.laying_out import lay_out
from refitd_plugin.layout import HOLDER, LaidOutDelta
from refitd_plugin.loading import Loading
from refitd_plugin.patch import HostPatch, Patch, Shifts
from refitd_plugin.plan import ReplayPlan
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import MOST_DELTAS, ServedState, leads_from
from refitd_plugin.source import FullNeededError
from refitd_plugin.tensor_feed import TensorFeed
from refitd_plugin.update_source import UpdateSource, write_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedDelta:
    """A delta that fits the `served_state`, laid out by `plan`. `contents` are the fingerprints that the model's
    tensors will have, `fingerprints` those of the checkpoint's tensors, and `slice_check` is what the slices of others
    will have; None where it is not known what they have now.
    """

    served_state: ServedState
    plan: ReplayPlan
    patch: Patch | None
    contents: dict[str, str]
    fingerprints: list[tuple[str, int]]
    slice_check: SliceCheck | None


def fit_delta(changes: DeltaChanges, served_state: ServedState | None, loading: Loading) -> FittedDelta:
    """Hold a delta against what is served.

    Args:
        changes: the delta.
        served_state: what is in memory, None where that is not known.
        loading: the rank's loads, which have the plan to lay the delta out by.

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
    tables = loading.tables(plan, served_state.source)
    laid = changes.laid
    if laid is None or changes.placements is not tables.placements:
        laid = lay_out(changes.read().changes, tables.placements)
    patch = _patch(laid, list(tables.holders.values()))
    shifts = patch.look() if patch is not None else Shifts([], [0] * len(tables.holders))
    sums = tables.slices.shifted(served_state.slice_sums, laid, shifts.pieces)
    expected = changes.manifest.fingerprints
    return FittedDelta(
        served_state=served_state,
        plan=plan,
        patch=patch,
        contents={
            name: f"{int(served_state.contents[name], 16) + shift & MASK:016x}"
            for name, shift in zip(tables.holders, shifts.holders, strict=True)
        },
        fingerprints=_expected(changes, served_state, laid, shifts),
        slice_check=None if sums is None else tables.slices.check(sums, expected, "refit.json"),
    )


def _check_order(changes: DeltaChanges, served_state: ServedState) -> None:
    """Refuse a delta from another version, one too many, and one whose other tensors are not those in memory."""
    if not leads_from(changes, served_state.label):
        raise FullNeededError(
            f"the delta leads from {changes.base} to {changes.label}, and the engine holds {served_state.label}: "
            "load a full version"
        )
    if len(served_state.followed_by(changes.handle)) > MOST_DELTAS:
        raise FullNeededError(f"there are {MOST_DELTAS} deltas since {served_state.source.label}: load a full version")
    expected = changes.manifest.fingerprints
    for name, found in served_state.fingerprints:
        if name not in changes.results and name in expected and int(expected[name], 16) != found:
            raise FullNeededError(f"tensor {name} is not what {changes.label} is made of: load a full version")


def _patch(laid: LaidOutDelta, holders: list[Any]) -> Patch | None:
    if not laid.names:
        return None
    if not holders[int(laid.groups[0].table[0, HOLDER])].is_cuda:
        return HostPatch(laid, holders)
    from refitd_plugin.device_patch import DevicePatch

    return DevicePatch(laid, holders)


def _expected(
    changes: DeltaChanges, served_state: ServedState, laid: LaidOutDelta, shifts: Shifts
) -> list[tuple[str, int]]:
    """The fingerprints that the checkpoint's tensors will have, which are those that the delta promises."""
    whole: dict[str, list[int]] = {}
    for name, is_whole, shift in zip(laid.names, laid.whole, shifts.pieces, strict=True):
        if is_whole:
            whole.setdefault(name, []).append(shift)
    found: list[tuple[str, int]] = []
    for name, before in served_state.fingerprints:
        after = before + whole[name].pop(0) & MASK if name in whole else before
        if name in whole and after != changes.results[name]:
            raise FullNeededError(
                f"tensor {name} would have fingerprint {after:016x} with the delta, and should have "
                f"{changes.results[name]:016x}: the weights in memory are of another version"
            )
        found.append((name, after))
    return found


class DeltaInPlace(UpdateSource):
    """See `UpdateSource`."""

    kind = "delta"

    def __init__(self, changes: DeltaChanges, loading: Loading) -> None:
        folder, nbytes = changes.place.folder, changes.nbytes
        super().__init__(loading, label=changes.label, digest=changes.digest, folder=folder, nbytes=nbytes)
        self.changes = changes
        self._fitted: FittedDelta | None = None

    @property
    def signature(self) -> str:
        """See `UpdateSource`: as of now; `is_unchanged` says whether that is what was read."""
        return signature(self.changes.place.root, self.changes.place.path)

    def is_unchanged(self) -> bool:
        return self.changes.is_unchanged()

    def look(self, served_state: ServedState | None) -> None:
        """Make it fit: translate it, read what is there, and compute what follows. The engine may serve meanwhile.

        Raises:
            SourceRefusedError: it does not fit.
        """
        self._fitted = fit_delta(self.changes, served_state, self.loading)

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        if served_state is not None and contents != served_state.contents:
            raise FullNeededError(f"the weights in memory are not those of {served_state.label} any more")
        ready = self._fitted
        if ready is None or ready.served_state is not served_state or not self.loading.has(ready.plan):
            self.look(served_state)

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        patch = self._ready.patch
        return self.loading.apply(call, call.path, call.load_format, write_nothing if patch is None else patch.write)

    def check(self, contents: dict[str, str]) -> str | None:
        if contents != self._ready.contents:
            wrong = next(name for name, found in contents.items() if self._ready.contents.get(name) != found)
            return f"the model's {wrong} is not what the delta should have made of it"
        expected = self.changes.manifest.fingerprints
        self.proved = frozenset(name for name, _ in self._ready.fingerprints if name in expected)
        self.slice_check = self._ready.slice_check
        return None

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`: exactly what was overwritten."""
        patch = self._ready.patch
        return self.loading.apply(call, path, "auto", write_nothing if patch is None else patch.undo)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        ready = self._ready
        source, deltas = ready.served_state.source, ready.served_state.followed_by(self.changes.handle)
        check, prints = ready.slice_check, ready.fingerprints
        sums = None if check is None else check.found
        return ServedState(source=source, deltas=deltas, contents=contents, fingerprints=prints, slice_sums=sums)

    @property
    def _ready(self) -> FittedDelta:
        if self._fitted is None:
            raise RuntimeError("a delta is written that was not looked at")
        return self._fitted
