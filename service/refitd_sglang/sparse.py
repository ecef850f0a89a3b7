"""A delta on its way into a model, in place.

Before the first write it is known that it fits: the model holds what it held when its version was found to be there,
that version is the delta's base or one since, and each changed tensor's fingerprint, less the old elements and plus the
new ones, is the one that the delta promises. After the last write the model's tensors have the fingerprints that
follow.

Where a delta cannot be translated (a loader computes the tensor, or nobody has seen how it is loaded) nothing is
guessed: a full version is asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd.catalog.examine import signature
from refitd_client.fingerprint.definition import MASK
from refitd_sglang.changes import Changes
from refitd_sglang.feeding import Feed
from refitd_sglang.laid import HOLDER, Laid, lay
from refitd_sglang.loading import Call, Loading
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


class Sparse:
    """As `Way`."""

    kind = "delta"

    def __init__(self, changes: Changes, loading: Loading) -> None:
        self.changes = changes
        self.proved = 0
        self._loading = loading
        self._fitted: Fitted | None = None

    @property
    def label(self) -> str:
        """As `Way`."""
        return self.changes.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return self.changes.digest

    @property
    def signature(self) -> str:
        """As `Way`: as of now; `is_unchanged` says whether that is what was read."""
        return signature(self.changes.place.root, self.changes.place.path)

    @property
    def nbytes(self) -> int:
        """As `Way`."""
        return self.changes.nbytes

    @property
    def folder(self) -> Path:
        """As `Way`."""
        return self.changes.place.folder

    @property
    def watches(self) -> bool:
        """As `Way`: a delta is held against what is there before anyone writes."""
        return False

    def is_unchanged(self) -> bool:
        """As `Way`."""
        return self.changes.is_unchanged()

    def look(self, standing: Standing | None) -> None:
        """Make it fit: translate it, read what is there, and see what comes of it. The engine may serve meanwhile.

        Raises:
            SourceRefusedError: it does not fit.
        """
        self._fitted = fitted(self.changes, standing, self._loading)

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """As `Way`."""
        if standing is not None and contents != standing.contents:
            raise FullNeededError(f"the weights in memory are not those of {standing.label} any more")
        ready = self._fitted
        if ready is None or ready.standing is not standing or not self._loading.has(ready.plan):
            self.look(standing)

    def write(self, call: Call) -> tuple[Feed, str | None]:
        """As `Way`."""
        patch = self._ready.patch
        return self._loading.apply(call, call.path, call.load_format, patch.write if patch is not None else _nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`."""
        if contents != self._ready.contents:
            wrong = next(name for name, found in contents.items() if self._ready.contents.get(name) != found)
            return f"the model's {wrong} is not what the delta should have made of it"
        self.proved = len({name for name, _ in self._ready.prints if name in self.changes.manifest.fingerprints})
        return None

    def put_back(self, call: Call, previous: Standing | None, path: str) -> str | None:
        """As `Way`: exactly what was overwritten."""
        patch = self._ready.patch
        return self._loading.apply(call, path, "auto", patch.undo if patch is not None else _nothing)[1]

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`."""
        before = self._ready.standing
        deltas = before.followed_by(self.changes.kept)
        return Standing(source=before.source, deltas=deltas, contents=contents, prints=self._ready.prints)

    @property
    def _ready(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("a delta is written that was not looked at")
        return self._fitted


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
    holders = loading.holders(plan)
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
    ways = loading.ways(plan, standing.source)
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


def _nothing() -> None:
    """A delta that changes nothing on this rank."""
