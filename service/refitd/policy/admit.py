"""Whether a notice brings a new version. Pure: the notice and what is known in, one decision out.

The same notice again is the same version, for ever: also when the version was collected meanwhile. Other content for a
step is a conflict as far as it shows from outside (another path, other files, another digest in the notice than the
version has). Validation finds what does not show. Files where a version was collected are a conflict in any case: the
root was emptied under the journal, or the trainer began anew, and no engine would ever be brought to them.
"""

from dataclasses import dataclass

from refitd.state.version import VersionRecord
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
    outside. Not `there`: the directory is gone, and all this is what is known of it.
    """

    order: Order
    path: str
    digest: str | None
    signature: str
    kind: tuple[Kind, str | None] | None = None
    there: bool = True


def admit(notice: Notice, seen: Seen, known: VersionRecord | None) -> New | Same | Conflict:
    """Decide."""
    if known is None:
        return _other_digest(notice, seen) or New()
    step = f"step {notice.step} of run {notice.run} (generation {known.order.generation})"
    advice = "publish the next step, or restart the publisher, which opens a new generation"
    if known.path != seen.path:
        return Conflict(f"{step} is {known.path}, not {seen.path}: {advice}")
    # The watch may have found it first, and nobody may have read its manifest yet.
    kind, base = (known.kind, known.base) if known.noticed or seen.kind is None else seen.kind
    if (kind, base) != (notice.kind, notice.base):
        return Conflict(f"{step} was announced as {_told(kind, base)}, not {_told(notice.kind, notice.base)}: {advice}")
    if known.state is VersionState.DELETED and seen.there:
        return Conflict(f"{step} was served or passed over, and collected; its files are there again: {advice}")
    is_other = notice.digest is not None and known.digest is not None and notice.digest != known.digest
    if is_other or (known.state not in _FILES_GONE and _differs(known, seen)):
        return Conflict(f"the files of {step} are not those that were published first: {advice}")
    return _other_digest(notice, seen) or Same(known)


def _other_digest(notice: Notice, seen: Seen) -> Conflict | None:
    if not seen.there or None in (notice.digest, seen.digest) or notice.digest == seen.digest:
        return None
    return Conflict(f"what is at {seen.path} here has digest {seen.digest}, and {notice.digest} was published")


def _told(kind: Kind, base: str | None) -> str:
    return kind.value if base is None else f"{kind.value} on {base}"


def _differs(known: VersionRecord, seen: Seen) -> bool:
    if known.digest is not None and seen.digest is not None:
        return known.digest != seen.digest
    return known.signature is not None and known.signature != seen.signature
