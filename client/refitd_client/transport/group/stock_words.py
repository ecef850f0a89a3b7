"""What a sender process and a service say to one another about one stock engine, and what both compute alike. Pure.

An engine without refitd inside receives by endpoints of its own, which the service calls (docs/transports.md). So the
service has a connection to the sender beside the group: each sees at once that the other is gone, and the sender ends
then, which frees an engine that waits for it in a collective.

    service   EngineHello     which engine, how many ranks, and the parameters that it names
    sender    StockWelcome    where the group meets, and the checksums that the version gives
    sender    GroupMade       all ranks have joined
    service   EngineReady     the engine is paused, and receives from now on
    sender    BucketsSent     all buckets are sent
    service   EngineOver      it is over: "" or why the engine does not serve the version

A word is one line of JSON. Either side may close the connection in place of the next one.
"""

import hmac
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.decoding import json_decoder
from refitd_client.transport.ipc.offer import OfferedTensor

MAX_WORD_BYTES = 64 * 2**20  # the checksums of a hundred thousand tensors of several ranks
BUCKET_BYTES = 512 * 2**20
"""The most bytes of a bucket, unless one tensor has more: the engine holds one beside the model."""
MEET_SECONDS = 60.0  # until the sender has computed its checksums
JOIN_SECONDS = 30.0  # until all ranks have joined the group, while the engine generates
BUCKETS_SECONDS = 90.0  # for all buckets, while it is paused
Expected = list[dict[str, list[str]]]
"""For each rank, in order: the checksums of which each parameter must have one, by the parameter's name."""


class EngineHello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The service's first word. `transfer` is the name that the offer gives it, which no stranger knows.

    `engine` is the URL that the offer names. `device` is where its tensors are, as the engine says it.
    """

    transfer: str
    engine: str
    ranks: int
    device: str
    parameters: list[str]


class StockWelcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Where ranks 1 and on meet the sender, which is rank 0. `code` is `code_of` what is expected."""

    port: int
    group: str
    expected: Expected
    code: str


class GroupMade(msgspec.Struct, tag=True, frozen=True):
    """The sender has joined."""


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """The service may ask the engine for the first bucket."""


class BucketsSent(msgspec.Struct, tag=True, frozen=True):
    """The sender has nothing more to send."""


class SenderRefuses(msgspec.Struct, tag=True, frozen=True):
    """In place of any word of the sender's: why it does not go on."""

    reason: str


class EngineOver(msgspec.Struct, tag=True, frozen=True):
    """How it ended on the engine's side."""

    refused: str = ""


ServiceWord = EngineHello | EngineReady | EngineOver
SenderWord = StockWelcome | GroupMade | BucketsSent | SenderRefuses
_SERVICE: msgspec.json.Decoder[ServiceWord] = json_decoder(ServiceWord)
_SENDER: msgspec.json.Decoder[SenderWord] = json_decoder(SenderWord)


def line_of(word: ServiceWord | SenderWord) -> bytes:
    """The line that says a word."""
    return msgspec.json.encode(word) + b"\n"


def of_service(line: bytes) -> ServiceWord:
    """A word of the service's.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _SERVICE.decode(line)


def of_sender(line: bytes) -> SenderWord:
    """A word of the sender's.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _SENDER.decode(line)


def code_of(transfer: str, expected: Expected, secret: bytes) -> str:
    """The code that proves that a process which can read the root's secret expects these checksums.

    Args:
        transfer: its name.
        expected: the checksums.
        secret: the root's.
    """
    said = b"\n".join((b"stock", transfer.encode(), msgspec.json.encode(expected, order="sorted")))
    return hmac.digest(secret, said, "sha256").hex()


def buckets(tensors: Sequence[OfferedTensor], most: int = BUCKET_BYTES) -> Iterator[list[OfferedTensor]]:
    """The tensors of each bucket, in turn. In one, those of larger elements come first: each begins at a multiple of
    the size of its elements, as SGLang wants it.

    Args:
        tensors: all, in the offer's order.
        most: bytes of a bucket.
    """
    bucket, size = list[OfferedTensor](), 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield _aligned(bucket)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield _aligned(bucket)


def why_not_proved(found: Sequence[Mapping[str, str]], expected: Expected) -> str | None:
    """Why what the ranks of an engine hold is not the version; None where it is.

    Args:
        found: the checksums of each rank, in any order.
        expected: what the version gives.
    """
    if len(found) != len(expected):
        return f"{len(found)} ranks say what they hold, and {len(expected)} are expected"
    left = list(expected)
    for rank in found:
        faults = [_fault(rank, each) for each in left]
        if None not in faults:
            return faults[0]
        del left[faults.index(None)]
    return None


def _fault(found: Mapping[str, str], expected: Mapping[str, list[str]]) -> str | None:
    if (name := next(iter(expected.keys() ^ found.keys()), None)) is not None:
        return f"parameter {name[:100]!a} is there only before or only after the update"
    wrong = next((name for name, checksum in found.items() if checksum not in expected[name]), None)
    return None if wrong is None else f"parameter {wrong[:100]!a} is not what the trainer published"


def _aligned(bucket: list[OfferedTensor]) -> list[OfferedTensor]:
    return sorted(bucket, key=lambda tensor: -BITS[tensor.dtype])
