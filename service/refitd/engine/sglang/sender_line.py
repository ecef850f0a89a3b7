"""The service's connection to a trainer's sender process, about one engine (`refitd_client` `stock_words`).

The sender ends when this is closed: an engine that waits for it in a collective is free then. Nothing here is longer
than its deadline.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from refitd_client.transport.group.stock_words import (
    JOIN_SECONDS,
    MAX_WORD_BYTES,
    MEET_SECONDS,
    EngineHello,
    EngineOver,
    GroupMade,
    SenderRefuses,
    SenderWord,
    ServiceWord,
    StockWelcome,
    code_of,
    line_of,
    of_sender,
)
from refitd_client.transport.ipc.offer import Offer, OfferRefusedError, StockTransfer
from refitd_client.transport.ipc.offer_file import HandoverKeyRefusedError, ImportedTensors, read_secret

_CONNECT_SECONDS = 10.0
_Word = TypeVar("_Word", bound=SenderWord)


class SenderLostError(Exception):
    """The sender is gone, goes no further or says something else. The message is a sentence."""


class SenderLine:
    """A connection. Close it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, transfer: StockTransfer, engine: str) -> "SenderLine":
        """Connect to the sender of an engine, by its URL.

        Raises:
            SenderLostError: the transfer is not to this engine, or nothing listens.
        """
        port = transfer.ports.get(engine)
        if port is None:
            raise SenderLostError("the trainer does not send it to this engine")
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return cls(*await asyncio.open_connection(transfer.host, port, limit=MAX_WORD_BYTES))
        except (TimeoutError, OSError) as error:
            raise SenderLostError(
                f"the trainer's sender at {transfer.host}:{port} cannot be reached: {error}"
            ) from error

    async def meet(
        self, transfer: StockTransfer, secret: bytes, engine: str, device: str, ranks: Sequence[dict[str, str]]
    ) -> StockWelcome:
        """Say which engine it is, and hear where the group meets and what the engine is to hold afterwards.

        Args:
            transfer: the transfer.
            secret: the root's.
            engine: the engine's URL.
            device: the kind that its tensors are on.
            ranks: the checksums of each of its ranks now: what counts here is their names.

        Raises:
            SenderLostError: the sender goes no further, or what it says was not written by who has the secret.
        """
        names = sorted({name for rank in ranks for name in rank})
        hello = EngineHello(transfer=transfer.name, engine=engine, ranks=len(ranks), device=device, parameters=names)
        await self.say(hello)
        welcome = await self.hear(StockWelcome, MEET_SECONDS)
        if welcome.code != code_of(transfer.name, welcome.expected, secret):
            raise SenderLostError("what the sender says of the version was not made with this root's secret")
        return welcome

    async def group_made(self) -> None:
        """Hear that the sender has joined the group.

        Raises:
            SenderLostError: it has not.
        """
        await self.hear(GroupMade, JOIN_SECONDS)

    async def say(self, word: ServiceWord) -> None:
        """Say a word.

        Raises:
            SenderLostError: the sender is gone.
        """
        try:
            self._writer.write(line_of(word))
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._writer.drain()
        except (TimeoutError, OSError) as error:
            raise SenderLostError(f"the trainer's sender is gone: {error}") from error

    async def hear(self, kind: type[_Word], within: float) -> _Word:
        """Wait for a word, for `within` seconds.

        Raises:
            SenderLostError: it is another one, has not come in time, or the sender is gone.
        """
        try:
            async with asyncio.timeout(within):
                line = await self._reader.readline()
            word = of_sender(line) if line.endswith(b"\n") else None
        except TimeoutError:
            raise SenderLostError(f"the trainer's sender has said nothing for {within:g} s") from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise SenderLostError(f"the trainer's sender cannot be understood: {str(error)[:200]}") from error
        if isinstance(word, SenderRefuses):
            raise SenderLostError(f"the trainer's sender goes no further: {word.reason[:300]}")
        if not isinstance(word, kind):
            raise SenderLostError("the trainer's sender is gone" if word is None else "the sender is out of turn")
        return word

    async def over(self, refused: str = "") -> None:
        """Say how it ended, where the sender still listens."""
        with suppress(SenderLostError):
            await self.say(EngineOver(refused[:500]))

    def close(self) -> None:
        """Close it."""
        self._writer.close()


async def read_offer(root: Path, path: str) -> tuple[Offer, StockTransfer, bytes]:
    """An offer that is sent to engines without refitd inside, with the root's secret.

    Args:
        root: the root.
        path: of the offer's file, beneath it.

    Raises:
        SenderLostError: it is none, was withdrawn, or was not made with the root's secret.
    """

    def read() -> tuple[Offer, bytes]:
        secret = read_secret(root)
        imported = ImportedTensors(root / path, secret)
        imported.close()
        return imported.offer, secret

    try:
        offer, secret = await asyncio.to_thread(read)
    except (OfferRefusedError, HandoverKeyRefusedError, OSError) as error:
        raise SenderLostError(f"the offer cannot be used: {error}") from error
    if offer.stock is None:
        raise SenderLostError("the version is offered to engines that have refitd inside")
    return offer, offer.stock, secret
