"""An offer: which tensors a trainer lends, and where they lie. Plain data, authenticated; nothing is ever unpickled.

    {"format": 1, "version": "exp~v000007", "host": …, "boot": …, "pid": 4711, "tensors": [
      {"name": "model.norm.weight", "dtype": "BF16", "shape": [1536], "fingerprint": "53e0a1d1c2f5b7aa",
       "place": {"in": "device", "device": "GPU-…", "handle": "…base64 of 64 bytes…", "offset": 0}}, …]}
    hmac-sha256:…64 hex digits, over all bytes of the line above…

Who opens memory for a stranger gives it away, so whoever does not have the secret is not read any further. A code
proves who wrote an offer, not that it is still meant: `lent` says that.
"""

import hashlib
import hmac
from math import prod

import msgspec

from refitd_client.contract.naming import parse_version_id
from refitd_client.header import BITS

FORMAT = 1
MAX_OFFER_BYTES = 64 * 2**20
_MARK = b"\nhmac-sha256:"


class OfferRefusedError(ValueError):
    """An offer that is not taken. The message is a sentence."""


class HostPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="host"):
    """In a file of shared memory (tmpfs): its path, and the offset of the first byte."""

    path: str
    offset: int


class DevicePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="in", tag="device"):
    """On a GPU: its UUID, a handle of the allocation (CUipcMemHandle, 64 bytes), the offset of the first byte in it."""

    device: str
    handle: bytes
    offset: int


class OfferedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor, contiguous, row-major. `dtype` as safetensors names it; `fingerprint` as manifests have it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    place: HostPlace | DevicePlace

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * BITS[self.dtype] // 8


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All tensors of a version, in the memory of process `pid` on `host` since `boot` (the kernel's boot id)."""

    version: str
    host: str
    boot: str
    pid: int
    tensors: tuple[OfferedTensor, ...]
    format: int = FORMAT


def seal(offer: Offer, secret: bytes) -> bytes:
    """The bytes of its file."""
    line = msgspec.json.encode(offer)
    return line + _MARK + _code(line, secret)


def unseal(data: bytes, secret: bytes) -> Offer:
    """Read an offer that anyone may have written.

    Raises:
        OfferRefusedError: it was not made with this secret, or is none.
    """
    line, mark, code = data.rpartition(_MARK)
    if not mark or not hmac.compare_digest(code, _code(line, secret)):
        raise OfferRefusedError("the offer was not made with this root's secret: is it damaged, or another root's?")
    try:
        offer = msgspec.json.decode(line, type=Offer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise OfferRefusedError(f"the offer cannot be read: {str(error)[:200]!a}") from error
    _check(offer)
    return offer


def _check(offer: Offer) -> None:
    if offer.format != FORMAT:
        raise OfferRefusedError(f"the offer has format {offer.format}; this refitd reads format {FORMAT}")
    if parse_version_id(offer.version) is None:
        raise OfferRefusedError(f"the offer is of {offer.version[:100]!a}, which is no version")
    names = [tensor.name for tensor in offer.tensors]
    if len(set(names)) < len(names):
        raise OfferRefusedError("the offer names a tensor twice")
    for tensor in offer.tensors:
        if (fault := _fault(tensor)) is not None:
            raise OfferRefusedError(f"tensor {tensor.name[:100]!a}: {fault}")


def _fault(tensor: OfferedTensor) -> str | None:
    if tensor.dtype not in BITS:
        return f"dtype {tensor.dtype[:20]!a} is unknown"
    if any(size < 0 for size in tensor.shape) or tensor.place.offset < 0:
        return "a size or an offset is negative"
    if isinstance(tensor.place, DevicePlace) and len(tensor.place.handle) != 64:
        return "its handle has not 64 bytes"
    return None


def _code(line: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, line, hashlib.sha256).hexdigest().encode()
