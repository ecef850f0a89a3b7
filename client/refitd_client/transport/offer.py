"""An offer: which tensors a trainer exports, and where they lie. Plain data, authenticated; nothing is ever unpickled.

    {"format": 2, "host": …, "boot": …, "pid": 4711, "life": "…", "tensors": [
      {"name": "model.norm.weight", "dtype": "BF16", "shape": [1536],
       "place": {"in": "device", "device": "GPU-…", "handle": "…64 bytes…", "serial": 17, "offset": 0}}, …]}
    {"version": "exp~v000007", "fingerprints": "…8 bytes for each tensor, little-endian…", "transfer": {…}}
    hmac-sha256:…64 hex digits, over all bytes of the lines above…

(bytes in base64). The first line is the layout, and the same at each step as long as tensors stay where they are. It is
in every offer, so that none depends on another; but a trainer writes it, and an engine reads it, once. `transfer` is
there where the trainer also sends the tensors over process groups, to ranks that cannot open its memory.
`"files": false` is there where no files are to follow if all engines take the tensors.

Where each rank of a trainer lends its shards, a tensor has `parts`: strips of its bytes, each with a place of its own;
its own place means nothing then. `lenders` are the locks that the other ranks hold while they live and lend
(`exporter`). Such an offer has format 3, and releases that know only format 2 refuse it.

An engine must not open memory for a process that it does not trust, so an offer without the secret's code is not read
any further. A code proves who wrote an offer, not that it still holds: `offer_file` says that.
"""

import hmac
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeVar

import msgspec

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import parse_version_id
from refitd_client.transport.schedule import Strip, common

FORMAT = 2
FORMAT_OF_RANKS = 3
MAX_OFFER_BYTES = 64 * 2**20
_SIGNATURE_MARK = b"\nhmac-sha256:"
ALIGNED = 64  # bytes: where a tensor may begin in memory that holds several
Allocation = tuple[bytes, int]
"""Handle and number of a GPU's memory, as a place has them."""
_MARK = "\0"  # in the names of pieces, and of no tensor of a checkpoint
_LENDER_LOCK = re.compile(r"\.lender-[0-9a-f]{16}\.lock")

_Line = TypeVar("_Line", bound=msgspec.Struct)


class OfferRefusedError(ValueError):
    """An offer that is refused. The message is a sentence."""


class HostPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="host"):
    """In a file of shared memory (tmpfs): its path, and the offset of the first byte."""

    path: str
    offset: int


NOWHERE = HostPlace(os.devnull, 0)


class DevicePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="device"):
    """On a GPU: its UUID, a handle of the allocation (CUipcMemHandle, 64 bytes), its number in the process (no other
    allocation ever has it), the offset of the first byte in it.
    """

    device: str
    handle: bytes
    serial: int
    offset: int

    @property
    def allocation(self) -> "Allocation":
        return self.handle, self.serial


class OfferedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a tensor that one rank of a trainer has: `rows` rows of `width` bytes, the first from byte `begin` on
    and each `pitch` bytes after the one before. At `place` they follow each other without gaps.
    """

    begin: int
    width: int
    rows: int
    pitch: int
    place: HostPlace | DevicePlace

    @property
    def nbytes(self) -> int:
        return self.width * self.rows

    @property
    def end(self) -> int:
        """The byte of the tensor after its last."""
        return self.begin + (self.rows - 1) * self.pitch + self.width


class OfferedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor, contiguous, row-major. `dtype` as safetensors names it. With `parts` it lies there, and not at
    `place`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: HostPlace | DevicePlace
    parts: tuple[OfferedPart, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8

    @property
    def pieces(self) -> "tuple[OfferedTensor, ...]":
        """Its parts as tensors of their own, in one dimension; itself where it has none."""
        if not self.parts:
            return (self,)
        return tuple(
            OfferedTensor(piece_name(self.name, number), self.dtype, (part.nbytes * 8 // BITS[self.dtype],), part.place)
            for number, part in enumerate(self.parts)
        )


def piece_name(tensor: str, number: int) -> str:
    """The name of a part of a tensor, as a tensor of its own."""
    return f"{tensor}{_MARK}{number}"


class OfferLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where tensors lie: in the memory of process `pid` on `host` since `boot` (the kernel's boot id). `life` is drawn
    anew by each process. `lenders` are the names of the locks of the trainer's other ranks, whose memory it names too.
    """

    host: str
    boot: str
    pid: int
    life: str
    tensors: tuple[OfferedTensor, ...]
    format: int = FORMAT
    lenders: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def pieces(self) -> tuple[OfferedTensor, ...]:
        """The tensors as they lie in memory: whole, or in parts."""
        return tuple(piece for tensor in self.tensors for piece in tensor.pieces)

    @property
    def locks(self) -> tuple[str, ...]:
        """The names in `lenders`, none where one process lends."""
        return () if self.lenders is msgspec.UNSET else self.lenders


class GroupTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How ranks receive the tensors over process groups (`script`).

    `name` is drawn anew for each transfer. `host` and `port` are the address of the first sender's store, where all
    meet. `receivers` are the ranks that may take part, by the names of their sockets. `senders` counts the trainer's
    processes. Of several each sends its shards: no process has whole tensors, and the layout's places mean nothing.

    `needs` has the digests of what receivers get that do not get everything, by their names. For each digest `slices`
    has what the bytes that are sent of each tensor that is sent in part add to its fingerprint (8 bytes each,
    little-endian, in the order of the tensors' names).
    """

    name: str
    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    receivers: tuple[str, ...]
    senders: int = 1
    needs: dict[str, str] = {}
    slices: dict[str, bytes] = {}


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The second line. Releases that know of no transfers, and none without files, read it where it says neither."""

    version: str
    fingerprints: bytes
    transfer: GroupTransfer | None = None
    files: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All tensors of a version. `fingerprints` are as manifests have them, in the layout's order; `line` is the layout
    as the file has it; `transfer` says how ranks elsewhere receive them, None where they are not sent.
    `files`: the version's files are to follow, also where all engines take it.
    """

    version: str
    layout: OfferLayout
    fingerprints: tuple[int, ...]
    line: bytes = field(repr=False)
    transfer: GroupTransfer | None = None
    files: bool = True

    @property
    def expected(self) -> dict[str, str]:
        """The fingerprints by name, as manifests have them."""
        numbers = zip(self.layout.tensors, self.fingerprints, strict=True)
        return {tensor.name: f"{number:016x}" for tensor, number in numbers}


def offer_with(layout: OfferLayout, version: str, fingerprints: Sequence[int], line: bytes | None = None) -> Offer:
    """An offer of a version. `line`: the layout as JSON, if it is known: encoding it takes longer than the rest."""
    line = msgspec.json.encode(layout) if line is None else line
    return Offer(version=version, layout=layout, fingerprints=tuple(fingerprints), line=line)


def seal(offer: Offer, secret: bytes) -> bytes:
    """The bytes of the offer's file."""
    numbers = struct.pack(f"<{len(offer.fingerprints)}Q", *offer.fingerprints)
    contents = _Contents(
        version=offer.version,
        fingerprints=numbers,
        transfer=offer.transfer,
        files=offer.files,
    )
    body = b"\n".join((offer.line, msgspec.json.encode(contents)))
    return body + _SIGNATURE_MARK + _code(body, secret)


def unseal(data: bytes, secret: bytes, known: Offer | None = None) -> Offer:
    """Read an offer from an untrusted writer. `known`: an offer that was read before. If the layouts are equal, the
    result has the same object. Raises OfferRefusedError: it was not made with this secret, or is malformed.
    """
    body, mark, code = data.rpartition(_SIGNATURE_MARK)
    if not mark or not hmac.compare_digest(code, _code(body, secret)):
        raise OfferRefusedError("the offer was not made with this root's secret: is it damaged, or another root's?")
    line, _, last = body.partition(b"\n")
    layout = known.layout if known is not None and known.line == line else _layout(line)
    contents = _decoded(last, _Contents)
    if parse_version_id(contents.version) is None:
        raise OfferRefusedError(f"the offer is of {contents.version[:100]!a}, which is no version")
    if len(contents.fingerprints) != 8 * len(layout.tensors):
        raise OfferRefusedError("the offer has not one fingerprint for each tensor")
    numbers = struct.unpack(f"<{len(layout.tensors)}Q", contents.fingerprints)
    return Offer(
        version=contents.version,
        layout=layout,
        fingerprints=numbers,
        line=line,
        transfer=contents.transfer,
        files=contents.files,
    )


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes, in bytes, lie in one piece of memory: their offsets, and the bytes of all."""
    offsets, end = list[int](), 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNED) * ALIGNED
    return offsets, end


def _layout(line: bytes) -> OfferLayout:
    """Decode a layout, and check every tensor of it."""
    layout = _decoded(line, OfferLayout)
    if layout.format not in {FORMAT, FORMAT_OF_RANKS}:
        raise OfferRefusedError(
            f"the offer has format {layout.format}; this refitd reads formats {FORMAT} and {FORMAT_OF_RANKS}"
        )
    if not all(is_lock_name(name) for name in layout.locks):
        raise OfferRefusedError("the offer names a lock that no rank of a trainer has")
    names = [tensor.name for tensor in layout.tensors]
    if len(set(names)) < len(names):
        raise OfferRefusedError("the offer names a tensor twice")
    for tensor in layout.tensors:
        if (fault := _fault(tensor)) is not None:
            raise OfferRefusedError(f"tensor {tensor.name[:100]!a}: {fault}")
    return layout


def _decoded(line: bytes, kind: type[_Line]) -> _Line:
    try:
        return from_json(line, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OfferRefusedError(f"the offer cannot be read: {str(error)[:200]!a}") from error


def _fault(tensor: OfferedTensor) -> str | None:
    if tensor.dtype not in BITS:
        return f"dtype {tensor.dtype[:20]!a} is unknown"
    places = [tensor.place, *(part.place for part in tensor.parts)]
    if any(size < 0 for size in tensor.shape) or any(place.offset < 0 for place in places):
        return "a size or an offset is negative"
    if any(isinstance(place, DevicePlace) and len(place.handle) != 64 for place in places):
        return "its handle has not 64 bytes"
    return fault_of_parts(tensor) if tensor.parts else None


def is_lock_name(name: str) -> bool:
    """Whether a rank of a trainer could have given its lock this name."""
    return _LENDER_LOCK.fullmatch(name) is not None


def strips_of(parts: Sequence[OfferedPart]) -> list[Strip]:
    return [Strip(part.begin, part.width, part.rows, part.pitch) for part in parts]


def fault_of_parts(tensor: OfferedTensor) -> str | None:
    """Why the parts of a tensor are not the tensor, each of its bytes once; None where they are."""
    if _MARK in tensor.name:
        return "its name has a zero byte"
    item = max(1, BITS[tensor.dtype] // 8)
    for part in tensor.parts:
        numbers = part.begin, part.width, part.pitch
        if part.begin < 0 or part.width < 1 or part.rows < 1 or (part.rows > 1 and part.pitch < part.width):
            return "a part has no bytes, or rows that overlap"
        if any(number % item for number in numbers):
            return "a part begins or ends within an element"
        if part.end > tensor.nbytes:
            return "a part ends beyond it"
    if sum(part.nbytes for part in tensor.parts) != tensor.nbytes:
        return "its parts have not as many bytes as it has"
    return "two of its parts overlap" if _overlap(strips_of(tensor.parts)) else None


def _overlap(strips: Sequence[Strip]) -> bool:
    waiting = list[Strip]()  # those that may reach the next one
    for each in sorted(strips):
        waiting = [before for before in waiting if before.end > each.begin]
        if any(common(before, each) for before in waiting):
            return True
        waiting.append(each)
    return False


def _code(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, body, "sha256").hex().encode()
