"""The process that reads for a rank. It takes one order at a time, and hears meanwhile that it is to give up.

It ends when its rank does: the socket says so, and where a copy of the rank's end lives on somewhere, its parent.
"""

import os
import queue
import socket
import struct
import threading

import msgspec

from refitd_sglang.ahead import letters, line
from refitd_sglang.ahead.reading import Reading

_LOOK_SECONDS = 5
_ASKED: msgspec.msgpack.Decoder[letters.Asked] = msgspec.msgpack.Decoder(letters.Asked)


class ClerkProcess:
    """`line` is its end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._orders: queue.SimpleQueue[tuple[letters.Order, threading.Event]] = queue.SimpleQueue()
        self._reading = Reading()
        self._parent = os.getppid()

    def serve(self) -> None:
        """Until the rank is gone; then the process ends, whatever it is at."""
        threading.Thread(target=self._work, name="refitd-clerk", daemon=True).start()
        # Of receiving alone: the other thread sends, however long that takes.
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _LOOK_SECONDS, 0))
        stop = threading.Event()
        while (letter := self._next()) is not None:
            match letter:
                case letters.Stop():
                    stop.set()
                case letters.Order():
                    stop = threading.Event()
                    self._orders.put((letter, stop))
        os._exit(0)

    def _next(self) -> letters.Asked | None:
        while os.getppid() == self._parent:
            try:
                return line.receive(self._line, _ASKED)[0]
            except TimeoutError:
                continue
            except line.LineLostError:
                return None
        return None

    def _work(self) -> None:
        while True:
            order, stop = self._orders.get()
            found = self._reading.read(order, stop)
            try:
                line.send(self._line, found.reply, found.files)
            except OSError:
                os._exit(0)
            finally:
                found.close()
