"""What has arrived, held against what the trainer has announced of it.

What the needed bytes of a tensor add to its fingerprint is computed by the trainer's ranks, each of what it sends, and
by the receiver of what has arrived. It is a sum over elements with their places in the whole tensor, so it shows lost,
changed and misplaced elements as a fingerprint of the whole does.
"""

import logging
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refitd_client.fingerprint import Scan, fingerprints, width_of
from refitd_client.fingerprint.device import INTEGERS, flat_bits
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import ElementRows, PartInput, has_triton, part_scans
from refitd_client.transport.child import Receive
from refitd_client.transport.membership import FlatMemory, TransferError
from refitd_client.transport.needs import NeedsRefusedError, RankNeeds, read_needs
from refitd_client.transport.offer import Offer
from refitd_client.transport.schedule import HeldStrip, Strip, common, offset_in
from refitd_client.write.cuda import pin, unpin

_log = logging.getLogger("refitd_client")


class PinnedMemory:
    """Mapped memory of the host that the first GPU of this process reads and writes at the speed of the bus.

    What is received over NCCL arrives on the GPU, and is copied from there. On an H200, for 3.09 GB, that took 180 ms
    into pageable memory and 62 into this, and then the fingerprints 3 s by processors and 42 ms by the GPU
    (docs/measurements.md).
    """

    def __init__(self, flat: Any) -> None:
        """Register it. Where the driver will not, as with a small limit of locked memory, it stays pageable. `flat`:
        all of a mapping, as bytes.
        """
        pages = -(-flat.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._address = int(flat.data_ptr())
        self._scan: Any = None
        error = pin(self._address, pages, 0)
        self.is_pinned = not error
        if error:
            _log.warning("the CUDA driver did not register %d bytes (error %d): they are received slowly", pages, error)

    def fingerprints(self, tensors: Sequence[Any]) -> list[int] | None:
        """Those of tensors in this memory, which are always the same ones, by the GPU; None where it cannot read it."""
        if not self.is_pinned or not has_triton():
            return None
        if self._scan is None:
            from refitd_client.fingerprint.batch import PROGRAMS_OVER_BUS, AddressScan
            from refitd_client.fingerprint.device import whole_tensor

            parts = [whole_tensor(number, flat_bits(each)) for number, each in enumerate(tensors) if each.numel()]
            device = torch.device("cuda", torch.cuda.current_device())
            self._scan = AddressScan(parts, len(tensors), device, PROGRAMS_OVER_BUS)
        found: list[Scan] = self._scan.begin()()
        return [each.fingerprint for each in found]

    def close(self) -> None:
        """End the registration, before the memory is unmapped."""
        if self.is_pinned:
            self.is_pinned = False
            unpin(self._address, 0)


class KnownNeeds:
    """What this receiver needs, read once for each digest."""

    def __init__(self) -> None:
        self._known: tuple[str, RankNeeds] | None = None

    def of(self, order: Receive, offer: Offer) -> RankNeeds:
        """What an order says that it needs of what is offered. Raises TransferError: it is not there any more, or is of
        other tensors.
        """
        if self._known is None or self._known[0] != order.needs:
            try:
                self._known = order.needs, read_needs(Path(order.root), order.name, order.needs)
            except (NeedsRefusedError, OSError) as error:
                raise TransferError(f"what this rank needs cannot be read: {error}") from error
        needs = self._known[1]
        if not needs.fits({each.name: each.nbytes for each in offer.layout.tensors}):
            raise TransferError("the version has other tensors than this rank's needs name")
        return needs


def prove_needed(offer: Offer, tensors: Mapping[str, Any], digest: str, needs: RankNeeds) -> None:
    """Hold what a receiver needs against the offer. Tensors that it does not need are not looked at. Raises
    TransferError: something else has arrived, or the offer does not say what it should be.
    """
    partial = needs.partial()
    announced = {} if offer.transfer is None else announced_slices(offer.transfer.slices.get(digest, b""), partial)
    dtypes = {each.name: each.dtype for each in offer.layout.tensors}
    whole = [(each.name, number) for each, number in zip(offer.layout.tensors, offer.fingerprints, strict=True)
             if needs.tensors[each.name].strips and each.name not in partial]  # fmt: skip
    for (name, number), found in zip(whole, fingerprints(tensors[name] for name, _ in whole), strict=True):
        check_arrived(name, found, number)
    flats = {name: FlatMemory([tensors[name].reshape(-1).view(torch.uint8)]) for name in partial}
    inputs = [(name, _input(flats[name], each, each.begin, each.pitch, dtypes[name]))
              for name, strips in partial.items() for each in strips]  # fmt: skip
    found = _summed(inputs)
    for name in partial:
        check_arrived(name, found.get(name, 0), announced[name])


def check_arrived(name: str, found: int, announced: int) -> None:
    """Raises TransferError where a fingerprint is not the one that was announced."""
    if found != announced:
        raise TransferError(
            f"what has arrived is not what the trainer announced: {name[:100]!a} has fingerprint {found:016x}, and "
            f"{announced:016x} was announced"
        )


def sent_slices(
    memory: FlatMemory,
    held: Mapping[str, Sequence[HeldStrip]],
    dtypes: Mapping[str, str],
    partial: Mapping[str, Sequence[Strip]],
) -> dict[str, int]:
    """What the needed bytes of what one sender has add to the fingerprints of tensors that are needed in part. `held`:
    where its strips are in there, by the tensors' names. `partial`: the needed strips, by name.
    """
    inputs: list[tuple[str, PartInput]] = []
    for name, needed in partial.items():
        for each in held.get(name, ()):
            for piece in (piece for one in needed for piece in common(each.strip, one)):
                at = each.at + offset_in(each.strip, piece.begin)
                pitch = 0 if piece.rows == 1 else each.at + offset_in(each.strip, piece.begin + piece.pitch) - at
                inputs.append((name, _input(memory, piece, at, pitch, dtypes[name])))
    return _summed(inputs)


def announced_slices(packed: bytes, partial: Mapping[str, Sequence[Strip]]) -> dict[str, int]:
    """What an offer says of the tensors that are needed in part. Raises TransferError: it says it of others."""
    if len(packed) != 8 * len(partial):
        raise TransferError("the offer does not say what the parts of tensors should be")
    return dict(zip(sorted(partial), struct.unpack(f"<{len(partial)}Q", packed), strict=True))


def _input(memory: FlatMemory, piece: Strip, at: int, pitch: int, dtype: str) -> PartInput:
    """Bytes of a tensor that lie at byte `at`, row after row `pitch` bytes apart."""
    width = width_of(dtype)
    if any(number % width for number in (piece.begin, piece.width, piece.pitch)):
        raise TransferError("a part of a tensor begins or ends within an element")
    bits = memory.rows(at, pitch or piece.width, piece.width, piece.rows).contiguous().view(-1)
    if bits.data_ptr() % width:
        bits = bits.clone()
    place = ElementRows(piece.begin // width, piece.width // width, piece.rows, piece.pitch // width)
    return PartInput(bits.view(INTEGERS[width]), [place])


def _summed(inputs: Sequence[tuple[str, PartInput]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _), scan in zip(inputs, part_scans([each for _, each in inputs]), strict=True):
        found[name] = (found.get(name, 0) + scan.fingerprint) & MASK
    return found
