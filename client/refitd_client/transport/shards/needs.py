"""The bytes of a version that one engine rank needs, as the rank says it and a trainer reads it.

A rank that knows how its model is loaded writes them into its own folder, `<root>/.refitd/receivers/<name>/`, and says
their digest when it is asked what it is. A trainer that sends to the rank reads the file, sends these bytes alone, and
names the digest in its offer, which is authenticated. The rank takes part only if that is the digest of what it needs
then. So the file need not be trusted: what is not of the digest is not used, and a rank with other needs refuses.

Parts of tensors have no fingerprint in the offer's list, which is of whole tensors. So the offer also has, for each
digest, what the needed bytes of each tensor that is needed in part add to its fingerprint.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import plain_file, read_at
from refitd_client.transport.shards.strips import Strip, strip

FOLDER = "receivers"
PREFIX = "needs-"
_NEEDS_BYTES = 64 * 2**20


PartialNeeds = dict[str, tuple[Strip, ...]]
"""The strips of each tensor that is needed in part, by name."""


class TensorNeeds(msgspec.Struct, frozen=True, array_like=True):
    """The size of one tensor in bytes, and the strips of it that are needed: none where the rank does not hold it."""

    nbytes: int
    strips: tuple[Strip, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether some of it is needed, and not all."""
        return bool(self.strips) and sum(each.nbytes for each in self.strips) < self.nbytes


class RankNeeds(msgspec.Struct, frozen=True):
    """What one rank needs of each tensor of a version, by name."""

    tensors: dict[str, TensorNeeds]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is of tensors of these names and sizes, and of bytes that they have."""
        if {name: each.nbytes for name, each in self.tensors.items()} != dict(sizes):
            return False
        return all(_is_within(part, each.nbytes) for each in self.tensors.values() for part in each.strips)

    def partial(self) -> PartialNeeds:
        """The tensors that are needed in part, in order of their names."""
        return {name: each.strips for name, each in sorted(self.tensors.items()) if each.is_partial}


class NeedsRefusedError(ValueError):
    """A file that says nothing of use. The message is a sentence."""


def encode(needs: RankNeeds) -> tuple[bytes, str]:
    """The bytes of its file, and their digest."""
    data = msgspec.json.encode(needs)
    return data, xxhash.xxh3_128_hexdigest(data)


def path_of(root: Path, receiver: str, digest: str) -> Path:
    """Where a rank writes it."""
    return root / SERVICE_FOLDER / FOLDER / receiver / f"{PREFIX}{digest}"


def read_needs(root: Path, receiver: str, digest: str) -> RankNeeds:
    """Read what a rank needs.

    Args:
        root: refitd's root.
        receiver: the rank's name.
        digest: what the rank says of it.

    Raises:
        NeedsRefusedError: it is another one, or malformed.
        OSError: it is not there, or cannot be read.
    """
    if not digest.isalnum():
        raise NeedsRefusedError(f"{digest[:50]!a} is no digest")
    with plain_file(path_of(root, receiver, digest)) as fd:
        size = os.fstat(fd).st_size
        data = read_at(fd, min(size, _NEEDS_BYTES), 0)
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise NeedsRefusedError("the file is not what the rank has announced")
    try:
        return from_json(data, RankNeeds)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NeedsRefusedError(f"the file cannot be read: {str(error)[:200]!a}") from error


def whole(nbytes: int) -> TensorNeeds:
    """All of a tensor."""
    return TensorNeeds(nbytes, (strip(0, nbytes),) if nbytes else ())


def numbered(needs: RankNeeds, names: Sequence[str]) -> dict[int, Sequence[Strip]]:
    """The same by the tensors' numbers, for the schedule."""
    return {number: needs.tensors[name].strips for number, name in enumerate(names)}


def _is_within(each: Strip, nbytes: int) -> bool:
    if each.begin < 0 or each.width <= 0 or each.rows <= 0 or (each.rows > 1 and each.pitch < each.width):
        return False
    return each.end <= nbytes
