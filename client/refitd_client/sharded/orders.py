"""What rank 0 asks of the ranks, what they answer, and how a publication ended. Rank 0 is one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refitd_client.contract.manifest import ManifestFile
from refitd_client.delta.change import Indices
from refitd_client.errors import ServiceError
from refitd_client.fingerprint import Bits
from refitd_client.publish.options import ALWAYS, DeltaRules
from refitd_client.publish.publication import Publication
from refitd_client.sharded.layout import Claim, Location, WritePart
from refitd_client.transport.child import TransferSent
from refitd_client.transport.choice import TrainerPlace
from refitd_client.transport.needs import PartialNeeds
from refitd_client.transport.offer import DevicePlace, GroupTransfer, HostPlace
from refitd_client.transport.schedule import Strip
from refitd_client.transport.script import ShardTable
from refitd_client.ways import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A rank has called `publish`. `claims` are None where they are those of layout number `layout`.

    `transport` is what it asks for; `place` says where its tensors are, where it asks for any. `durable` is its word on
    which versions get files, `delta_rules` on deltas. `shadow` is the number of the shadow that it has. `is_on_gpu`:
    all its tensors are on one GPU.
    """

    step: int
    layout: int
    claims: list[Claim] | None
    samples: dict[str, int]
    transport: Transport | None = None
    place: TrainerPlace | None = None
    durable: str = ALWAYS
    delta_rules: DeltaRules = field(default_factory=DeltaRules)
    shadow: int = 0
    is_on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOpening:
    """A rank has called `publish` with a source of weights, of which it says `word` (`publish.ports`)."""

    word: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """Read your source to its end, and keep this share of it. The reply is an `Opening`."""

    share: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A layout as one rank needs it."""

    number: int
    files: list[str]
    locations: dict[str, Location]
    parts: list[WritePart]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """Write your parts into this staging folder of the run. `task` is None where it is that of the last time."""

    staging: str
    task: RankTask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestOrder:
    """All is written and synced: digest these files, with their tensors' `fingerprints` where they are wanted."""

    names: list[str]
    fingerprints: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """Have your GPU copy your parts into the slot that is this staging folder of the run, and begin to digest your
    blocks of it. `task` as for `WriteOrder`; `fingerprints` says whether these are wanted.
    """

    staging: str
    task: RankTask | None
    fingerprints: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOrder:
    """All ranks have copied their parts: say what your blocks' digests are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendOrder:
    """Scan what you write, and lend it, to engines or to your own process that sends: from where it lies, or copied. It
    must not change before the next order. `task` as for `WriteOrder`.

    `known` is the number of the places that rank 0 has from you, 0 for none; None where they are not wanted, since what
    you have is sent. `partial` are the strips of tensors that engine ranks need in part, by the digest of their needs
    and by name.
    """

    task: RankTask | None
    known: int | None = None
    partial: Mapping[str, PartialNeeds] = field(default_factory=dict[str, PartialNeeds])


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Begin to send what you lend. `table` is what rank 0's sender plans from, None for the others."""

    transfer: GroupTransfer
    table: ShardTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """Wait for receivers no longer, and say what has come of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOrder:
    """Copy your parts, as shadow `number`. `task` as for `WriteOrder`."""

    number: int
    task: RankTask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOrder:
    """Compare your parts with shadow `number`. If more than `most` elements changed, how many is enough."""

    number: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherOrder:
    """Say what is in shadow `number` at these flat indices of whole tensors, of which the rank has some."""

    number: int
    wanted: Mapping[str, Indices]


@dataclass(frozen=True, slots=True)
class LentPart:
    """Bytes of a tensor that lie without gaps at a place, one strip after the other."""

    name: str
    strips: tuple[Strip, ...]
    place: HostPlace | DevicePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LentReply:
    """All is scanned, and lent from now on. `scans` are as in `CopiedReply`; `slices` are what this rank's parts add
    where a tensor is needed in part, by digest and name.

    `places` have the number `number`, and are None where rank 0 has them or does not want them. `lock` is the name of
    the lock that this rank holds as long as it lends to engines (`transport.exporter`), "" on rank 0, which has the
    exporter's. `host` and `boot` say where it runs.
    """

    scans: dict[str, tuple[int, int]]
    slices: dict[str, dict[str, int]]
    number: int
    places: tuple[LentPart, ...] | None
    lock: str
    host: str
    boot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedReply:
    """All is copied into the slot. `scans` are what this rank's parts add to each tensor's fingerprint, and how many of
    their elements are not finite, by name.
    """

    scans: dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReply:
    """The digests of this rank's blocks (`rank_slot.blocks_of`), in their order."""

    digests: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReply:
    """What has come of a transfer on one rank: what was sent, or why nothing was."""

    sent: TransferSent | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedChanges:
    """Elements of many tensors with the same types, one after the other: few large arrays are sent faster.

    Piece `i` is `counts[i]` elements of tensor `names[i]`: their flat indices in the whole tensor, in strict order, and
    their bits. A tensor may have several pieces.
    """

    names: Sequence[str]
    counts: Sequence[int]
    indices: Indices
    values: Bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChangesReply:
    """What a rank has found in its parts: `count` elements that changed, and, unless they are too many, which.

    `shifts` are what to add to the tensors' fingerprints.
    """

    count: int = 0
    shifts: dict[str, int] = field(default_factory=dict[str, int])
    packed: Sequence[PackedChanges] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneReply:
    """An order was carried out. `files` are what it digested, `fingerprints` those of the tensors in them."""

    files: dict[str, ManifestFile] = field(default_factory=dict[str, ManifestFile])
    fingerprints: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedReply:
    """An order was not carried out, or a rank could not begin. `is_argument`: its arguments cannot be."""

    error: Exception
    is_argument: bool = False


RankOrder = (
    SourceOrder | WriteOrder | DigestOrder | CopyOrder | BlocksOrder | LendOrder | SendOrder | EndOrder | KeepOrder
    | CompareOrder | GatherOrder
)  # fmt: skip
RankReply = Opening | DoneReply | CopiedReply | BlocksReply | LentReply | SentReply | ChangesReply | FailedReply


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOutcome:
    """The version is committed, or engines have it in memory alone. `publication` is rank 0's, without its connection;
    `error` is what the service refused the notice with. `shadow` is the number of the shadow that stands, 0 for none.
    """

    publication: Publication
    error: ServiceError | None
    shadow: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedOutcome:
    """Nothing was published. `broken` says why the publisher cannot be used again, None if it can."""

    error: Exception
    broken: str | None
