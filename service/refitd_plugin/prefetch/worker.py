"""A rank's prefetch process as the rank sees it: begun when a service is there, asked, stopped, begun again if lost."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Event, Lock

import msgspec

from refitd_client.contract.decoding import msgpack_decoder
from refitd_plugin.prefetch import messages
from refitd_plugin.prefetch import messages as framed_socket

logger = logging.getLogger("refitd_plugin")

_TURN_SECONDS = 0.1  # between two looks at whether it is still wanted
_STOP_REPLY_SECONDS = 5.0  # until a prefetch worker that was sent a Stop has to reply
_BEGIN_AGAIN_SECONDS = 30.0  # between two beginnings: one that dies at once costs a core
_REPLY: msgspec.msgpack.Decoder[messages.Reply] = msgpack_decoder(messages.Reply)


class PrefetchWorker:
    """At most one process. `generation` counts them: a new process has none of the state of the one before."""

    def __init__(self) -> None:
        self.generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._begun_at = -_BEGIN_AGAIN_SECONDS
        self._turn = Lock()

    def begin(self) -> None:
        """Start the process, unless there is one or the last was started just now. Never raises."""
        with self._turn:
            if self._line is not None or time.monotonic() - self._begun_at < _BEGIN_AGAIN_SECONDS:
                return
            self._begun_at = time.monotonic()
            try:
                self._spawn()
            except OSError as error:
                logger.warning("refitd reads versions in a thread, since no process can be begun: %s", error)

    def ask(self, order: messages.ReadOrder, stop: Event) -> tuple[messages.Reply, list[int]] | None:
        """The reply and the files that came with it, which are the caller's to close. None: there is no process now.

        Once `stop` is set the process stops reading, and replies that it did.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._line is None else self._reply(self._line, order, stop)
        except (OSError, framed_socket.LineLostError) as error:
            logger.warning("refitd has lost the process that reads for it, and reads in a thread: %s", error)
            self._end()
            return None
        finally:
            self._turn.release()

    def end(self) -> None:
        """End the process."""
        with self._turn:
            self._end()

    @property
    def pid(self) -> int | None:
        """The process's id; None where there is none."""
        return None if self._process is None else self._process.pid

    def _spawn(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with its:
                self._process = _process(its.fileno())
        except BaseException:
            mine.close()
            raise
        mine.settimeout(_TURN_SECONDS)
        self._line, self.generation = mine, self.generation + 1

    def _reply(self, mine: socket.socket, order: messages.ReadOrder, stop: Event) -> tuple[messages.Reply, list[int]]:
        framed_socket.send(mine, order)
        told_at: float | None = None
        while True:
            with suppress(TimeoutError):
                return framed_socket.receive(mine, _REPLY)
            if stop.is_set() and told_at is None:
                framed_socket.send(mine, messages.Stop())
                told_at = time.monotonic()
            if told_at is not None and time.monotonic() - told_at > _STOP_REPLY_SECONDS:
                raise framed_socket.LineLostError("it does not stop")

    def _end(self) -> None:
        process, mine, self._process, self._line = self._process, self._line, None, None
        if mine is not None:
            mine.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_REPLY_SECONDS)


def _process(line: int) -> subprocess.Popen[bytes]:
    """Start it in a session of its own: signals that a terminal sends to the server are not for it."""
    path = os.pathsep.join(dict.fromkeys(each for each in sys.path if each))
    return subprocess.Popen(  # noqa: S603 - this Python, and no words from outside
        [sys.executable, "-P", "-m", "refitd_plugin.prefetch", str(line)],
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ) | {"PYTHONPATH": path},
        start_new_session=True,
    )
