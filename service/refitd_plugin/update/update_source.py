"""How one version gets into a model, and what is served then: a full version, and the deltas that were applied to it.

A full version is here, and so is one that is served already; see also `delta.in_place` and `memory.offered`.

    fit        the last look before the first write: does it fit what is in memory now?
    write      through the engine's own function
    check      is what is in memory now what it should be?
    put_back   what was there before
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from refitd_client.contract.naming import MANIFEST_NAME, Order, parse_version_id
from refitd_client.contract.plugin import TensorProof
from refitd_client.delta.change import Delta
from refitd_client.fingerprint.device import flat_bits
from refitd_client.validation.validate import Options
from refitd_plugin.delta.changes import DeltaChanges, DeltaHandle
from refitd_plugin.memory.source import FullNeededError, VersionSource
from refitd_plugin.port import UpdateCall
from refitd_plugin.proof.contents import held_against
from refitd_plugin.proof.slices import SliceCheck, SliceSums
from refitd_plugin.update.loading import Loading, Readied, TensorFeed

MOST_DELTAS = 200  # each is a descriptor, and one more file to go through when a version is put back


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedState:
    """A version that is served. `contents` are the fingerprints of the model's tensors, `fingerprints` those of the
    checkpoint's tensors that lie whole in it, and `slice_sums` what lies in it in slices of others, where it is known.
    """

    source: VersionSource
    deltas: tuple[DeltaHandle, ...] = ()
    contents: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    fingerprints: Sequence[tuple[str, int]] = field(default=(), repr=False)
    slice_sums: SliceSums | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return self.deltas[-1].label if self.deltas else self.source.label

    @property
    def folder(self) -> Path:
        return (self.deltas[-1] if self.deltas else self.source).place.folder

    def tensors(self) -> Mapping[str, Any]:
        """Its tensors by name, as a full version of it would have them.

        Raises:
            SourceRefusedError: the file of a delta is not what it was. OSError: it cannot be read.
        """
        tensors = self.source.tensors()
        return Patched(tensors, [each.read() for each in self.deltas]) if self.deltas else tensors

    def followed_by(self, handle: DeltaHandle) -> tuple[DeltaHandle, ...]:
        """The deltas after one more. One that leads from the full version itself replaces all before it."""
        return (handle,) if handle.base == self.source.label else (*self.deltas, handle)


class Patched(Mapping[str, Any]):
    """Tensors with deltas applied: each is changed, as a copy, when it is read."""

    def __init__(self, tensors: Mapping[str, Any], deltas: Sequence[Delta]) -> None:
        self._tensors, self._deltas = tensors, deltas

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        changes = [each.changes[name] for each in self._deltas if name in each.changes]
        if changes:
            tensor = tensor.clone()
            bits = flat_bits(tensor).numpy()
            for change in changes:
                bits.view(change.values.dtype)[change.indices] = change.values
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def leads_from(changes: DeltaChanges, label: str) -> bool:
    """Whether a delta's base is that version, or an earlier one of the same generation: by their ids."""
    base, held, version = (parse_version_id(each) for each in (changes.base, label, changes.label))
    if base is None or held is None or version is None or len({base[0], held[0], version[0]}) > 1:
        return False
    before: Order = held[1]
    return changes.base == label or (
        base[1].generation == before.generation and base[1].step <= before.step and before < version[1]
    )


class UpdateSource(ABC):
    """A version that was opened and checked. Contents are fingerprints of the model's tensors, as `contents_of`.

    `label` is the version's id, `digest` is equal for equal versions, `folder` is where its files lie, `nbytes` is what
    is to be read of them, and `proved` has, after `check`, the names of the tensors that lie in memory with the
    fingerprints of the version's manifest. Of the tensors that the ranks have slices of, `check` leaves what they find
    out together in `slice_check`.
    """

    kind: ClassVar[str]
    proved: frozenset[str] = frozenset()
    slice_check: SliceCheck | None = None

    def __init__(self, loading: Loading, *, label: str, digest: str, folder: Path, nbytes: int) -> None:
        self.loading, self.label, self.digest, self.folder, self.nbytes = loading, label, digest, folder, nbytes

    @property
    def signature(self) -> str:
        """What its files look like from outside: equal to the service's for the very same files."""
        return self.digest

    @property
    def watches(self) -> bool:
        """Whether `write` itself takes the contents of before and after, beside its work."""
        return False

    @abstractmethod
    def is_unchanged(self) -> bool:
        """Whether its folder still looks as it did."""

    @abstractmethod
    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """Hold it against what is in memory; `contents` is empty where `write` itself watches that.

        Raises:
            SourceRefusedError: it does not fit.
        """

    @abstractmethod
    def write(self, call: UpdateCall) -> TensorFeed:
        """Load the version. The feed says how far that came."""

    @abstractmethod
    def check(self, contents: dict[str, str]) -> str | None:
        """What is wrong with what is in memory now, if anything is."""

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> TensorFeed:
        """Bring back what was there before. Through the model's loader, since the load plan may be at fault.
        `previous`: what was served before it; None where that cannot be read. `path`: the folder that the engine named
        as served before.
        """
        if previous is None:
            return TensorFeed({}, fault="what was served before cannot be read any more")
        return self.loading.put_back(call, previous.tensors(), path)

    @abstractmethod
    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """What is served from now on, as far as it is known."""


class FullVersion(UpdateSource):
    """A full version on disk: loaded by the model's loader, or as the load plan's copies.

    `says` is what has its fingerprints. `readied` are its copies, made ready while the engine served, and `proof` what
    was found in its tensors then.
    """

    kind = "full"
    says: ClassVar[str] = MANIFEST_NAME

    def __init__(self, source: VersionSource, options: Options, loading: Loading) -> None:
        folder, nbytes = source.place.folder, source.nbytes
        super().__init__(loading, label=source.label, digest=source.digest, folder=folder, nbytes=nbytes)
        self.source = source
        self.partial = bool(options.allow_missing)  # it may leave some of what was there before
        self.readied: Readied | None = None
        self.proof: TensorProof | None = None
        self._others: list[int] | None = None
        self._fingerprints: list[tuple[str, int]] = []

    @property
    def signature(self) -> str:
        return self.source.structure.signature

    @property
    def expected(self) -> Mapping[str, str]:
        """The fingerprints of its tensors as hex digits, by name, as far as something says them."""
        manifest = self.source.structure.manifest
        return {} if manifest is None else manifest.fingerprints

    @property
    def watches(self) -> bool:
        ready = self.readied
        return ready is not None and ready.schedule.watch is not None and self.loading.has(ready.plan)

    def is_unchanged(self) -> bool:
        return self.source.is_unchanged()

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: UpdateCall) -> TensorFeed:
        feed = self.loading.load(call, self.source, partial=self.partial, readied=self.readied)
        self._others = feed.others
        return feed

    def check(self, contents: dict[str, str]) -> str | None:
        """Tensors that are only copied have the fingerprints that are expected of them."""
        self._fingerprints, self.slice_check = [], None
        if (tables := self.loading.tables_of(self.source)) is not None:
            self._fingerprints = tables.fingerprints.take(contents, self._others)
            if tables.plan.inventory == self.source.inventory:
                self.slice_check = tables.slices.check(None, self.expected, self.says)
        self.proved, fault = held_against(self._fingerprints, self.expected, self.says)
        return fault

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        if self.partial:
            return None
        sums = None if self.slice_check is None else self.slice_check.found
        return ServedState(source=self.source, contents=contents, fingerprints=self._fingerprints, slice_sums=sums)


class ServedAgain(UpdateSource):
    """An update to what is served already: SGLang records it once more, and nothing is written.

    SGLang loads a version before it says that it could not flush its cache, as where something else has paused it in
    place, and keeps its old path and label. The service then has it loaded again. A delta does not lead from itself,
    and an offer may be over: where the weights are still what that update left, there is nothing to write.
    """

    kind = "again"

    def __init__(self, served_state: ServedState, loading: Loading) -> None:
        label = served_state.label
        super().__init__(loading, label=label, digest=f"again:{label}", folder=served_state.folder, nbytes=0)
        self._served_state = served_state

    @property
    def signature(self) -> str:
        """Nothing is read of the version's files."""
        return ""

    def is_unchanged(self) -> bool:
        return True

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        if served_state is not self._served_state or contents != self._served_state.contents:
            raise FullNeededError(f"the weights in memory are not those of {self.label} any more")

    def write(self, call: UpdateCall) -> TensorFeed:
        return self.loading.apply(call, call.path, call.load_format, write_nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        if contents != self._served_state.contents:
            return "the weights have changed, though the update wrote nothing"
        return None

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> TensorFeed:
        return self.loading.apply(call, path, "auto", write_nothing)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        return self._served_state


def write_nothing() -> None:
    """For an update that changes nothing on this rank."""
