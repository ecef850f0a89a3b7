"""The process that reads for a rank. It takes one order at a time, and hears meanwhile that it is to give up.

It ends when its rank does: the socket says so, and where a copy of the rank's end lives on somewhere, its parent.
"""

import os
import queue
import socket
import struct
import threading

import msgspec

from refitd_plugin.prefetch import framed_socket, messages
from refitd_plugin.prefetch.reading import VersionReader

_LOOK_SECONDS = 5
_ASKED: msgspec.msgpack.Decoder[messages.Asked] = msgspec.msgpack.Decoder(messages.Asked)


class PrefetchProcess:
    """`line` is its end of the socket."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._orders: queue.SimpleQueue[tuple[messages.ReadOrder, threading.Event]] = queue.SimpleQueue()
        self._reading = VersionReader()
        self._parent = os.getppid()

    def serve(self) -> None:
        """Until the rank is gone; then the process ends, whatever it is at."""
        threading.Thread(target=self._work, name="refitd-prefetch", daemon=True).start()
        # Of receiving alone: the other thread sends, however long that takes.
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _LOOK_SECONDS, 0))
        stop = threading.Event()
        while (message := self._next()) is not None:
            match message:
                case messages.Stop():
                    stop.set()
                case messages.ReadOrder():
                    stop = threading.Event()
                    self._orders.put((message, stop))
        os._exit(0)

    def _next(self) -> messages.Asked | None:
        while os.getppid() == self._parent:
            try:
                return framed_socket.receive(self._line, _ASKED)[0]
            except TimeoutError:
                continue
            except framed_socket.LineLostError:
                return None
        return None

    def _work(self) -> None:
        while True:
            order, stop = self._orders.get()
            found = self._reading.read(order, stop)
            try:
                framed_socket.send(self._line, found.reply, found.files)
            except OSError:
                os._exit(0)
            finally:
                found.close()
