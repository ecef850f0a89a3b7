"""The messages between ranks. Rank 0 sends orders, the others answer each with one reply."""

from dataclasses import dataclass, field

from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.naming import Order
from refitd_client.contract.wire import Notice
from refitd_client.errors import ServiceError
from refitd_client.sharded.layout import Claim, Location, WritePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A rank has called `publish`. `claims` are None where they are those of layout number `layout`."""

    step: int
    layout: int
    claims: list[Claim] | None
    samples: dict[str, int]


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
class DoneReply:
    """An order was carried out. `files` are what it digested, `fingerprints` those of the tensors in them."""

    files: dict[str, ManifestFile] = field(default_factory=dict[str, ManifestFile])
    fingerprints: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedReply:
    """An order was not carried out, or a rank could not begin."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOutcome:
    """The version is committed; `notice_error` is why the service was not told. `is_refused`: it refused the notice."""

    order: Order
    bytes: int
    digest: str
    timings: dict[str, float]
    notice: Notice
    notice_error: ServiceError | None
    is_refused: bool
    begun: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedOutcome:
    """Nothing was published. `broken` says why the publisher cannot be used again, None if it can."""

    error: Exception
    broken: str | None
