"""Whether a notice brings a new version. Pure: the notice and what is known in, one decision out.

The same notice again is the same version, for ever: also when the version was collected meanwhile. Other content for a
step is a conflict as far as it shows from outside (another path, other files). Validation finds what does not show.
"""

from dataclasses import dataclass

from refitd.catalog.record import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice

_FILES_GONE = frozenset({VersionState.RETIRED, VersionState.DELETED})


@dataclass(frozen=True, slots=True)
class New:
    """Take it."""


@dataclass(frozen=True, slots=True)
class Same:
    """It is known already."""

    known: VersionRecord


@dataclass(frozen=True, slots=True)
class Conflict:
    """It contradicts what is known."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look at the directory showed: the manifest's digest, kind and base where there is one, and the files from
    outside.
    """

    order: Order
    path: str
    digest: str | None
    signature: str
    kind: tuple[Kind, str | None] | None = None


def admit(notice: Notice, seen: Seen, known: VersionRecord | None) -> New | Same | Conflict:
    """Decide."""
    if known is None:
        return New()
    step = f"step {notice.step} of run {notice.run} (generation {known.order.generation})"
    advice = "publish the next step, or restart the publisher, which opens a new generation"
    if known.path != seen.path:
        return Conflict(f"{step} is {known.path}, not {seen.path}: {advice}")
    # The watch may have found it first, and nobody may have read its manifest yet.
    kind, base = (known.kind, known.base) if known.noticed or seen.kind is None else seen.kind
    if (kind, base) != (notice.kind, notice.base):
        return Conflict(f"{step} was announced as {_told(kind, base)}, not {_told(notice.kind, notice.base)}: {advice}")
    if known.state not in _FILES_GONE and _differs(known, seen):
        return Conflict(f"the files of {step} are not those that were published first: {advice}")
    return Same(known)


def _told(kind: Kind, base: str | None) -> str:
    return kind.value if base is None else f"{kind.value} on {base}"


def _differs(known: VersionRecord, seen: Seen) -> bool:
    if known.digest is not None and seen.digest is not None:
        return known.digest != seen.digest
    return known.signature is not None and known.signature != seen.signature
