"""What ranks say to each other. Rank 0 sends orders, the others answer each with one reply."""

from dataclasses import dataclass, field

from refitd_client.contract.manifest import ManifestFile
from refitd_client.contract.naming import Order
from refitd_client.contract.wire import Notice
from refitd_client.errors import ServiceError
from refitd_client.sharded.claims import Claim
from refitd_client.sharded.layout import Location, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A rank has come to `publish`. `claims` are None where they are those of layout number `layout`."""

    step: int
    layout: int
    claims: list[Claim] | None
    samples: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A layout as one rank needs it."""

    number: int
    files: list[str]
    locations: dict[str, Location]
    parts: list[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Write your parts into this staging folder of the run. `task` is None where it is the one of last time."""

    staging: str
    task: Task | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """All is written and synced: digest these files of the folder."""

    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An order was carried out. `files` are what it digested."""

    files: dict[str, ManifestFile] = field(default_factory=dict[str, ManifestFile])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An order was not carried out, or a rank could not begin."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The version is committed, and this is what became of the notice. `is_refused`: the service would not hear it."""

    order: Order
    bytes: int
    digest: str
    timings: dict[str, float]
    notice: Notice
    notice_error: ServiceError | None
    is_refused: bool
    begun: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing was published. `broken` says why the publisher cannot be used again, None if it can."""

    error: Exception
    broken: str | None
