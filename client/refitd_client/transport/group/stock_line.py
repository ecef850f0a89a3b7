"""The sender's end of its connection to the service (`stock_words`). Blocking, with a thread that reads."""

import os
import queue
import socket
import threading
from contextlib import suppress
from typing import TypeVar

import msgspec

from refitd_client.transport.group.membership import TransferError, WaitLimit
from refitd_client.transport.group.stock_words import (
    MAX_WORD_BYTES,
    EngineHello,
    SenderRefuses,
    SenderWord,
    ServiceWord,
    line_of,
    of_service,
)
from refitd_client.transport.ipc.offer import StockTransfer

_TURN_SECONDS = 0.25
_HELLO_SECONDS = 5.0  # for a stranger that connects and says nothing
_Word = TypeVar("_Word", bound=ServiceWord)


class ServiceLine:
    """A connection to the service. Set `is_vital` while an engine may wait for this process in a collective: it ends
    then as soon as the service is gone, which frees the engine.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.is_vital = False
        self._connection = connection
        self._words: queue.Queue[ServiceWord | None] = queue.Queue()
        connection.settimeout(None)
        threading.Thread(target=self._read, name="refitd-service-line", daemon=True).start()

    def say(self, word: SenderWord) -> None:
        """Say a word.

        Raises:
            TransferError: the service is gone.
        """
        try:
            self._connection.sendall(line_of(word))
        except OSError as error:
            raise TransferError(f"the service is gone: {error}") from error

    def hear(self, kind: type[_Word], waiting: WaitLimit) -> _Word:
        """Wait for a word.

        Raises:
            TransferError: it is another one, has not come in time, or the service is gone.
        """
        while True:
            try:
                word = self._words.get(timeout=min(waiting.left(), _TURN_SECONDS))
            except queue.Empty:
                continue
            if isinstance(word, kind):
                return word
            why = getattr(word, "refused", "") or "it has closed the connection, or said something else"
            raise TransferError(f"the service goes no further: {why}")

    def refuse(self, reason: str) -> None:
        """Say why it does not go on, where the service still listens."""
        try:
            self.say(SenderRefuses(reason))
        except TransferError:
            return

    def close(self) -> None:
        """Close it."""
        self.is_vital = False
        with suppress(OSError):  # the service was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        data = bytearray()
        try:
            while part := self._connection.recv(2**16):
                data += part
                while (end := data.find(b"\n")) >= 0:
                    self._words.put(of_service(bytes(data[:end])))
                    del data[: end + 1]
                if len(data) > MAX_WORD_BYTES:
                    break
        except (OSError, msgspec.MsgspecError):
            pass  # as where it was closed
        if self.is_vital:
            os._exit(1)
        self._words.put(None)


def accepted(listener: socket.socket, transfer: StockTransfer, waiting: WaitLimit) -> tuple[ServiceLine, EngineHello]:
    """Wait for the service. Who does not name the transfer is no service, and is sent away.

    Raises:
        TransferError: it has not come in time.
    """
    port = int(listener.getsockname()[1])
    listener.settimeout(_TURN_SECONDS)
    while True:
        waiting.left()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        line = ServiceLine(connection)
        try:
            hello = line.hear(EngineHello, waiting.at_most(_HELLO_SECONDS))
        except TransferError:
            line.close()
            continue
        if hello.transfer == transfer.name and transfer.ports.get(hello.engine) == port and hello.ranks > 0:
            return line, hello
        line.close()
