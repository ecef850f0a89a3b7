"""What the service knows of one version: a frozen record, replaced whenever something about it changes."""

from dataclasses import dataclass, field
from typing import ClassVar, cast

from refitd.state.parts import Parted, fact
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.manifest import Manifest
from refitd_client.contract.naming import DURABLE_KEY, Order, version_id, version_label
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import left_out_clause
from refitd_client.ways import way_of

_WHY_LENGTH = 300  # characters of a foreign text that are kept
_READ_AGAIN = "its files look otherwise than they did: they are read again, and nothing is loaded from them meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a version's trainer says of it, in its notice and in its manifest. The catalog writes it.

    `noticed`: there was a notice. `handed`: it was offered to engines from its trainer's memory, before its files were
    there. `may_lack` are patterns of the names of tensors that it may lack of those of the engines' model.
    `density` is the share of elements that changed since the version before, and `why_full` why it is no delta.
    `after` is the id of the run's newest version, where that was known before this one, of a lower step of its
    generation, appeared.
    """

    noticed: bool = False
    handed: bool = False
    may_lack: tuple[str, ...] = ()
    allow_extra: bool = False
    density: float | None = None
    why_full: str | None = None
    after: str | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesFound:
    """What was found in a version's files. `catalog/judge.py` writes it.

    `signature` sums up names, sizes and times of the files at the verdict. `inventory` is the digest of tensor names,
    shapes and dtypes; `digest` that of all bytes, `weights` that of the weight files, `shards` that of their names and
    sizes, `fingerprints` that of its tensors' fingerprints where its manifest has them. All are None until known; a
    delta has neither `weights` nor `shards`. `owned` says that refitd's own publisher wrote it (it has a manifest);
    `described` that the service keeps a manifest of a folder that has none. `lacks` is a digest of the names of the
    tensors that it lacks, "" where it lacks none; `left_out` are the first of them, `left_out_count` their number.
    """

    bytes: int | None = None
    digest: str | None = None
    weights: str | None = None
    shards: str | None = None
    inventory: str | None = None
    fingerprints: str | None = None
    signature: str | None = None
    owned: bool = False
    described: bool = False
    lacks: str = ""
    left_out: tuple[str, ...] = ()
    left_out_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a version was judged. The catalog writes it, and collection what it was before.

    `reason` is why it is in its state, and `code` says to programs why validation has REJECTED it.
    `in_doubt`: its files look otherwise than they did, and are read again; nothing is loaded from them meanwhile.
    `confirmed`: it has no manifest, and its files were read once more after its first load. `unended` counts the
    validations that began and did not end, because the service died meanwhile; it is written down before each begins.
    `proved_by` are the engines whose GPUs have read and proved its tensors, where the service itself has not.
    `bad_for` are the seconds for which it has been REJECTED or LOST while the service ran, as far as they are written
    down. `state_before` and `reason_before` are the state and the reason that it had before it was RETIRED.
    `notes` say what else is worth knowing of its files.
    """

    reason: str | None = None
    code: Code | None = None
    in_doubt: bool = False
    confirmed: bool = False
    unended: int = 0
    proved_by: tuple[str, ...] = ()
    bad_for: float = 0.0
    state_before: VersionState | None = None
    reason_before: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Career:
    """What operators and engines have made of a version.

    `given_up` is why this service has barred it by itself: its canary failed, or no engine came through a load of it.
    `served_at` is when it was first proven on every reachable engine of its run: the newest such version is the last
    good one.
    """

    pinned: bool = False
    barred: bool = False
    given_up: str | None = None
    served_at: str | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord(Parted):
    """One version: what its trainer says of it, what was found in its files, how it was judged, and what became of it.

    `path` is relative to the root. `kind` and `base` (a version's id) are the notice's, and without one the manifest's
    once it was read.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("announced", "files", "verdict", "career")

    run: str
    order: Order
    path: str
    state: VersionState
    created_at: str
    kind: Kind = Kind.FULL
    base: str | None = None
    announced: Announcement = Announcement()
    files: FilesFound = FilesFound()
    verdict: Judgement = Judgement()
    career: Career = Career()

    reason = cast("str | None", fact("verdict.reason"))
    digest = cast("str | None", fact("files.digest"))
    signature = cast("str | None", fact("files.signature"))
    handed = cast("bool", fact("announced.handed"))
    barred = cast("bool", fact("career.barred"))
    pinned = cast("bool", fact("career.pinned"))
    served_at = cast("str | None", fact("career.served_at"))

    @property
    def lacks_manifest(self) -> bool:
        """Whether engines find none of it, neither its trainer's nor the service's: refitd inside leaves it to them."""
        is_good = self.state is VersionState.SEALED and self.kind is Kind.FULL
        return is_good and not (self.files.owned or self.files.described)

    @property
    def id(self) -> str:
        """The id on the wire and in the journal."""
        return version_id(self.run, self.order)

    @property
    def label(self) -> str:
        """The weight_version that engines get with it."""
        return version_label(self.order)

    @property
    def in_memory(self) -> bool:
        """Whether it was handed over from its trainer's memory, and has no good files yet, or never will."""
        return self.handed and (self.state.is_open or self.state is VersionState.REJECTED)

    @property
    def was_never_served(self) -> bool:
        """Whether it was rejected before any engine served it: nothing can be rolled back from it."""
        return self.state is VersionState.REJECTED and self.served_at is None

    @property
    def why_barred(self) -> str:
        """Why no engine goes to it again, where it is barred: a clause, without the answers of a canary's check."""
        return "it was rolled back from" if self.career.given_up is None else self.career.given_up.partition(": ")[0]

    @property
    def doubt(self) -> str | None:
        """Why nothing is loaded from it just now, though its files may be good."""
        is_read = self.verdict.in_doubt and self.state.may_be_target
        return _READ_AGAIN if is_read else None

    @property
    def is_deleted_evidence(self) -> bool:
        """Whether it was REJECTED or LOST, and its files are deleted or about to be."""
        return self.state.is_over and self.verdict.state_before is not None and self.verdict.state_before.is_bad

    @property
    def was_good(self) -> bool:
        return self.digest is not None or self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether it was good and has lost its files, also where what was left of them is deleted since."""
        return self.as_judged.state is VersionState.LOST

    @property
    def as_judged(self) -> "VersionRecord":
        """The version with its last verdict: deleted evidence as it was before."""
        if not self.is_deleted_evidence or self.verdict.state_before is None:
            return self
        return self.having(state=self.verdict.state_before, reason=self.verdict.reason_before)

    @property
    def partly(self) -> str:
        """What it leaves out of the engines' model, as a clause; "" where it leaves out nothing."""
        return left_out_clause(self.files.left_out, self.files.left_out_count)

    @property
    def durability(self) -> str | None:
        """Its trainer's policy, by which it gets no files where all engines take it; None where files are to come."""
        return self.announced.metadata.get(DURABLE_KEY) if self.handed else None

    @property
    def files_to_come(self) -> str:
        """What its trainer says of the files of a version that was handed over, as the end of a sentence."""
        if self.durability is None:
            return "its files are to follow"
        return f"it gets files only where an engine does not take it (durable={self.durability})"

    @property
    def chosen(self) -> str | None:
        """By which transport its trainer publishes it, and why, in its own words; None where it does not say."""
        transport, why = self.announced.metadata.get("transport"), self.announced.metadata.get("transport_why")
        if transport is None:
            return None
        way = way_of(transport, self.kind)
        return f"{way} ({why})" if why else way

    @property
    def is_sent(self) -> bool:
        """Whether its trainer sends it over a process group, by what it says in the metadata."""
        return self.announced.metadata.get("transport") in {"nccl", "gloo"}

    def differs_in_weights(self, other: "VersionRecord") -> bool:
        """Whether it is proved that the two hold different tensors.

        Different fingerprints prove it, and so do different digests of files with the same names and sizes. Another
        split of the tensors into files, or another chat template, proves nothing.
        """
        if self.files.fingerprints is not None and other.files.fingerprints is not None:
            return self.files.fingerprints != other.files.fingerprints
        return (
            self.files.shards is not None
            and self.files.shards == other.files.shards
            and self.files.weights != other.files.weights
        )


def with_making(record: VersionRecord, manifest: Manifest) -> VersionRecord:
    """The record with what its manifest says of how the version was made. That is shown, and decides nothing."""
    density, delta = manifest.density, manifest.delta
    if density is None and delta is not None:  # written before manifests said so: against the base
        density = delta.changed / max(1, delta.elements)
    is_share = density is not None and 0 <= density <= 1
    why = None if manifest.why_full is None else manifest.why_full[:_WHY_LENGTH]
    if why is not None and not why.isprintable():  # some terminal may show it
        why = ascii(why)[1:-1]
    return record.having(density=density if is_share else None, why_full=why)
