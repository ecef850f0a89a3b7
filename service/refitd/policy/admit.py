"""Whether a notice brings a new version, and what of its metadata is kept. Pure.

The same notice again is the same version, also when that version was deleted meanwhile. Other content for a step is a
conflict as far as it shows from outside (another path, other files, another digest in the notice than the version has).
Validation finds what does not show. Files where a version was deleted are a conflict in any case: the root was emptied
under the journal, or the trainer began anew, and no engine would ever be brought to them.

Metadata is what a trainer says about a version for people and dashboards. It comes with the notice or in the manifest,
stays in memory and in the journal as long as its version, and so has limits. Where both say something, the notice wins:
it came later.
"""

from collections.abc import Mapping
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
class NoticeConflict:
    """It contradicts what is known."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFolder:
    """What a look at the directory showed: the manifest's digest, kind and base where there is one, and the files from
    outside. Not `there`: the directory is gone, and all this is what is known of it.
    """

    order: Order
    path: str
    digest: str | None
    signature: str
    kind: tuple[Kind, str | None] | None = None
    there: bool = True


def admit(notice: Notice, seen: SeenFolder, known: VersionRecord | None) -> New | Same | NoticeConflict:
    """Decide."""
    if known is None:
        return _other_digest(notice, seen) or New()
    step = f"step {notice.step} of run {notice.run} (generation {known.order.generation})"
    advice = "publish the next step, or restart the publisher, which opens a new generation"
    if known.path != seen.path:
        return NoticeConflict(f"{step} is {known.path}, not {seen.path}: {advice}")
    # The watch may have found it first, and its manifest may not have been read yet.
    kind, base = (known.kind, known.base) if known.noticed or seen.kind is None else seen.kind
    if (kind, base) != (notice.kind, notice.base):
        return NoticeConflict(
            f"{step} was announced as {_told(kind, base)}, not {_told(notice.kind, notice.base)}: {advice}"
        )
    if known.state is VersionState.DELETED and seen.there:
        return NoticeConflict(f"{step} was served or passed over, and collected; its files are there again: {advice}")
    is_other = notice.digest is not None and known.digest is not None and notice.digest != known.digest
    differs = known.signature is not None and known.signature != seen.signature
    if known.digest is not None and seen.digest is not None:
        differs = known.digest != seen.digest
    if is_other or (known.state not in _FILES_GONE and differs):
        return NoticeConflict(f"the files of {step} are not those that were published first: {advice}")
    return _other_digest(notice, seen) or Same(known)


def _other_digest(notice: Notice, seen: SeenFolder) -> NoticeConflict | None:
    if not seen.there or None in (notice.digest, seen.digest) or notice.digest == seen.digest:
        return None
    return NoticeConflict(f"what is at {seen.path} here has digest {seen.digest}, and {notice.digest} was published")


def _told(kind: Kind, base: str | None) -> str:
    return kind.value if base is None else f"{kind.value} on {base}"


MAX_ENTRIES = 64

MAX_CHARACTERS = 16 * 2**10

LIMITS = f"{MAX_ENTRIES} entries and {MAX_CHARACTERS} characters"


def fits(metadata: Mapping[str, str]) -> bool:
    """Whether it is little enough to be kept."""
    size = sum(len(key) + len(value) for key, value in metadata.items())
    return len(metadata) <= MAX_ENTRIES and size <= MAX_CHARACTERS


def completed(noticed: dict[str, str], published: Mapping[str, str]) -> dict[str, str] | None:
    """What the notice said and, beneath it, what the manifest says; None where that is too much to be kept."""
    both = {**published, **noticed}
    return both if fits(both) else None
