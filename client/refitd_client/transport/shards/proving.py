"""Parts of tensors held against what the trainer has announced of them.

What the needed bytes of a tensor add to its fingerprint is computed by the trainer's ranks, each of what it sends, and
by the receiver of what has arrived. It is a sum over elements with their places in the whole tensor, so it shows lost,
changed and misplaced elements as a fingerprint of the whole does.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refitd_client.fingerprint import fingerprints, width_of
from refitd_client.fingerprint.device import INTEGERS
from refitd_client.fingerprint.host import MASK
from refitd_client.fingerprint.tensors import ElementRows, PartInput, part_scans
from refitd_client.transport.group.child import Receive
from refitd_client.transport.group.membership import TransferError
from refitd_client.transport.ipc.offer import Offer
from refitd_client.transport.shards.needs import NeedsRefusedError, RankNeeds, read_needs
from refitd_client.transport.shards.schedule import HeldStrip
from refitd_client.transport.shards.strips import Strip, common, offset_in


class KnownNeeds:
    """What this receiver needs, read once for each digest."""

    def __init__(self) -> None:
        self._known: tuple[str, RankNeeds] | None = None

    def of(self, order: Receive, offer: Offer) -> RankNeeds:
        """What an order says that it needs of what is offered.

        Raises:
            TransferError: it is not there any more, or is of other tensors.
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
    """Hold what a receiver needs against the offer. Tensors that it does not need are not looked at.

    Args:
        offer: the trainer's.
        tensors: what has arrived, by name.
        digest: of the needs.
        needs: what was sent to this receiver, of the offer's tensors.

    Raises:
        TransferError: something else has arrived, or the offer does not say what it should be.
    """
    partial = needs.partial()
    announced = {} if offer.transfer is None else announced_slices(offer.transfer.slices.get(digest, b""), partial)
    dtypes = {each.name: each.dtype for each in offer.layout.tensors}
    whole = [(each.name, number) for each, number in zip(offer.layout.tensors, offer.fingerprints, strict=True)
             if needs.tensors[each.name].strips and each.name not in partial]  # fmt: skip
    for (name, number), found in zip(whole, fingerprints(tensors[name] for name, _ in whole), strict=True):
        check_arrived(name, found, number)
    flats = {name: tensors[name].reshape(-1).view(torch.uint8) for name in partial}
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
    memory: Any,
    held: Mapping[str, Sequence[HeldStrip]],
    dtypes: Mapping[str, str],
    partial: Mapping[str, Sequence[Strip]],
) -> dict[str, int]:
    """What the needed bytes of what one sender has add to the fingerprints of tensors that are needed in part.

    Args:
        memory: what it sends from, as bytes.
        held: where its strips are in there, by the tensors' names.
        dtypes: the tensors', as safetensors names them.
        partial: the needed strips, by name.
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
    """What an offer says of the tensors that are needed in part.

    Raises:
        TransferError: it says it of others.
    """
    if len(packed) != 8 * len(partial):
        raise TransferError("the offer does not say what the parts of tensors should be")
    return dict(zip(sorted(partial), struct.unpack(f"<{len(partial)}Q", packed), strict=True))


def _input(memory: Any, piece: Strip, at: int, pitch: int, dtype: str) -> PartInput:
    """Bytes of a tensor that lie at byte `at`, row after row `pitch` bytes apart."""
    width = width_of(dtype)
    if any(number % width for number in (piece.begin, piece.width, piece.pitch)):
        raise TransferError("a part of a tensor begins or ends within an element")
    rows = torch.as_strided(memory, (piece.rows, piece.width), (pitch or piece.width, 1), memory.storage_offset() + at)
    bits = rows.contiguous().view(-1)
    if bits.data_ptr() % width:
        bits = bits.clone()
    place = ElementRows(piece.begin // width, piece.width // width, piece.rows, piece.pitch // width)
    return PartInput(bits.view(INTEGERS[width]), [place])


def _summed(inputs: Sequence[tuple[str, PartInput]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (name, _), scan in zip(inputs, part_scans([each for _, each in inputs]), strict=True):
        found[name] = (found.get(name, 0) + scan.fingerprint) & MASK
    return found
