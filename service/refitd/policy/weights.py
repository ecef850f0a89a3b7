"""What each version's folder takes on disk, and what of it counts: the bytes that refitd may delete. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from refitd.policy.holdings import Holdings
from refitd.root.handle import parts_below
from refitd.root.outcome import Gone, Refused
from refitd.state.version import VersionRecord
from refitd_client.contract.states import VersionState

Found = Holdings | Gone | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What a version's folder takes, in bytes; None where nobody knows.

    `foreign` are those of them that refitd may not delete. `refusal` says why nothing of it may be deleted.
    """

    bytes: int | None = None
    foreign: int = 0
    refusal: str | None = None

    @property
    def counted(self) -> int:
        """The bytes that count in a disk budget."""
        return (self.bytes or 0) - self.foreign


Weights = Mapping[str, Weight]


def wants_look(version: VersionRecord) -> bool:
    """Whether only a look at its folder says what a version takes. Of a good one every byte was counted."""
    return version.state is not VersionState.SEALED


def weigh(
    versions: Iterable[VersionRecord], found: Mapping[str, Found], spared: Callable[[VersionRecord], bool]
) -> dict[str, Weight]:
    """Map the ids of versions to what they take. Bytes of a folder that several versions share count once.

    Args:
        versions: those to weigh.
        found: what looks at their folders have found, by path.
        spared: whether a version's folder is its trainer's to delete.
    """
    by_age = sorted(versions, key=lambda version: version.order)
    newest = {version.path: version.id for version in by_age}
    return {
        version.id: weight_of(version, found.get(version.path), is_spared=spared(version))
        if newest[version.path] == version.id
        else Weight(bytes=0)
        for version in by_age
    }


def weight_of(version: VersionRecord, found: Found | None, *, is_spared: bool) -> Weight:
    """What one version takes. `found` is None where nobody has looked at its folder."""
    is_ours = not is_spared and parts_below(version.path) is not None
    match found:
        case Holdings():
            total = found.bytes + found.foreign_bytes
            return Weight(bytes=total, foreign=found.foreign_bytes if is_ours else total, refusal=found.refusal)
        case Gone():
            return Weight(bytes=0)
        case _:
            return Weight(bytes=version.bytes, foreign=0 if is_ours else version.bytes or 0)
