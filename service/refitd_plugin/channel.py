"""A socket in the root, one for each rank, where the service meets the plugin: `<root>/.refitd/engines/<name>.sock`.

SGLang's HTTP routes run in the loop that computes tokens, so the service asks here for what may take long (reading a
version), and a thread of the plugin does it while the engine serves. A request is one line of JSON, and so is a reply:

    {"do": "hello"}                                    what is here: versions, rank, process, model, what is served
    {"do": "prepare", "path": "run/v000123", …}        check that version and keep it for the update that will name it
    {"do": "prepare", "path": …, "offer": …}           the same of a version in a trainer's memory
    {"do": "contents"}                                 a digest of what is in memory now
    {"do": "forget"}                                   close what was prepared
    {"do": "lead", "owner": {…}, "seconds": 30}        updates from other roots are refused for so long

Everything is bounded: the length of a line, the number of connections, how long one may be silent. Nothing is
unpickled, nothing runs in SGLang's threads, and whatever goes wrong here, the engine serves on without a channel.

The thread that takes a connection also answers it. To start one then takes several turns of the interpreter, each of
which has to be waited for beside SGLang's loop, and a request would wait for them for milliseconds.

The plugin's threads run beside the engine's loop in short turns of the interpreter.
SGLang's loop never waits, not even when there is nothing to do, so a thread that reads and digests 3 GB, and releases
the interpreter's lock some ten thousand times, would take minutes. It gets the lock back in one of two ways:

- It asks for it. A thread does so when it has waited `sys.getswitchinterval()`, 5 ms, in which no thread took a turn.
- It is faster than the loop, which releases the lock by itself at each system call, to take it again a microsecond
  later. A waiting thread is woken then, comes too late, and begins its wait anew (`take_gil` in CPython's ceval_gil.c):
  a loop that looks at its sockets every 0.1 ms is never asked.

So while a thread works here, its wait is shorter than what is between two of the loop's looks. Linux adds 50 µs to
each wait, unless the thread says that it wants none of that slack (PR_SET_TIMERSLACK, prctl(2)). The thread that a
request wakes has no turn yet in which it could shorten its wait: for it the interval stays short as long as the channel
listens. That changes nothing while no other thread waits.
"""

import ctypes
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ENGINES_FOLDER, MAX_LINE, PEER_CREDENTIALS, PluginRequest, socket_name
from refitd_client.files.plain_file import open_folder

logger = logging.getLogger("refitd_plugin")
_SHORT_SECONDS = 0.000005
_LISTENING_SECONDS = 0.00002  # shorter than what lies between two looks of the loop
_SET_SLACK, _GET_SLACK = 29, 30  # prctl(2), of the calling thread, in nanoseconds
_NO_SLACK = 1
_turn = threading.Lock()
_usual: list[float] = []  # the interval outside all contexts, while there are any
_wanted: list[float] = []
_prctl = getattr(ctypes.PyDLL(None), "prctl", None)  # not CDLL: its calls release the lock


def short_turns() -> AbstractContextManager[None]:
    """While the context lasts, a thread that waits for the lock gets it soon, and this one at once. For any thread."""
    return _turns_of(_SHORT_SECONDS)


def listening_turns() -> AbstractContextManager[None]:
    """While the context lasts, this thread gets the lock soon after a system call in which it has waited for long."""
    return _turns_of(_LISTENING_SECONDS)


@contextmanager
def _turns_of(seconds: float) -> Iterator[None]:
    with _turn:
        if not _usual:
            _usual.append(sys.getswitchinterval())
        _wanted.append(seconds)
        _set_interval()
    try:
        with _no_slack():
            yield
    finally:
        with _turn:
            _wanted.remove(seconds)
            _set_interval()


def _set_interval() -> None:
    sys.setswitchinterval(min(_usual + _wanted))
    if not _wanted:
        _usual.clear()


@contextmanager
def _no_slack() -> Generator[None]:
    if _prctl is None:
        yield
        return
    usual = _prctl(_GET_SLACK)
    _prctl(_SET_SLACK, ctypes.c_ulong(_NO_SLACK))
    try:
        yield
    finally:
        _prctl(_SET_SLACK, ctypes.c_ulong(usual))


MAX_CONNECTIONS = 8
SILENT_SECONDS = 60.0  # for a whole request, from the end of the one before
_CHANNEL_RETRY_SECONDS = 2.0


Reply = dict[str, Any]
Handler = Callable[[PluginRequest], Reply]


class Channel:
    """A socket that threads of the plugin listen at until the process ends. `rank` is part of the socket's name."""

    def __init__(self, root: Path, rank: int, handle: Handler) -> None:
        self.root = root
        self.name = socket_name(rank, os.getpid(), secrets.token_hex(4))
        self._handle = handle
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listens = threading.Event()
        self._given_up = threading.Event()

    def open(self) -> None:
        """Start to listen, now or as soon as the root has the service's folder."""
        threading.Thread(target=self._run, name="refitd-channel", daemon=True).start()

    def give_up(self) -> None:
        self._given_up.set()

    def is_open(self, within: float) -> bool:
        """Whether the socket listens, within so many seconds."""
        return self._listens.wait(within)

    def _run(self) -> None:
        while not self._given_up.is_set():
            try:
                self._listen()
            except FileNotFoundError:  # the service has not made its folder yet, or the root is not mounted yet
                self._given_up.wait(_CHANNEL_RETRY_SECONDS)
            except Exception as error:
                logger.warning("refitd has no channel in %s: %s", self.root, error)
                return

    def _listen(self) -> None:
        folder = _engines_folder(self.root)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(f"/proc/self/fd/{folder}/{self.name}")  # a socket's own path may have 107 bytes only
                os.chmod(self.name, 0o660, dir_fd=folder)
                listener.listen(MAX_CONNECTIONS)
                raise self._failure_of(listener)
            finally:
                self._listens.clear()
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # closing it would not wake those that wait for a connection
                with suppress(OSError):
                    os.unlink(self.name, dir_fd=folder)
                os.close(folder)

    def _failure_of(self, listener: socket.socket) -> Exception:
        """Have connections answered, until one cannot be taken: return why."""
        failures = SimpleQueue[Exception]()
        with short_turns():
            for _ in range(MAX_CONNECTIONS + 1):  # one of them turns away what is too much
                line = (listener, failures)
                threading.Thread(target=self._answer_all, args=line, name="refitd-channel-line", daemon=True).start()
        self._listens.set()
        return failures.get()

    def _answer_all(self, listener: socket.socket, failures: SimpleQueue[Exception]) -> None:
        try:
            with listening_turns():
                while True:
                    self._accept(listener)
        except Exception as error:
            failures.put(error)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if self._slots.acquire(blocking=False):
            self._serve(connection)
        else:
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                data = bytearray()
                with short_turns():  # a client that connects sends at once
                    more = self._reply(connection, data)
                while more:
                    more = self._reply(connection, data)
        except OSError:
            pass  # it went away, or was silent for too long
        except Exception:
            logger.warning("refitd's channel lost a connection", exc_info=True)
        finally:
            self._slots.release()

    def _reply(self, connection: socket.socket, data: bytearray) -> bool:
        """One request and its reply; whether there may be another. `data` has come already."""
        line = _line(connection, data)
        if line:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
            peer = PEER_CREDENTIALS.unpack(raw)[0]
            connection.sendall(msgspec.json.encode(self._answer(line, peer)) + b"\n")
        return 0 < len(line) <= MAX_LINE  # the rest of a longer one would be taken for a request

    def _answer(self, line: bytes, peer: int) -> Reply:
        if len(line) > MAX_LINE:
            return refused(f"a line has at most {MAX_LINE} bytes")
        try:
            request = msgspec.structs.replace(from_json(line, PluginRequest), peer=peer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return refused(f"not a request: {error}")
        try:
            return self._handle(request)
        except Exception as error:
            logger.warning("refitd could not answer %s", request.do, exc_info=True)
            return refused(f"{type(error).__name__}: {error}")


def _line(connection: socket.socket, data: bytearray) -> bytes:
    """The next line, the beginning of one that is too long, or nothing at the end. `data` is what has come, and keeps
    what comes after the line.

    Raises:
        TimeoutError: it has not come in whole.
    """
    until = time.monotonic() + SILENT_SECONDS
    while (end := data.find(b"\n", 0, MAX_LINE)) < 0 and len(data) <= MAX_LINE:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (part := connection.recv(MAX_LINE)):
            break
        data += part
    connection.settimeout(SILENT_SECONDS)  # for the reply
    line = bytes(data[: end + 1 if end >= 0 else MAX_LINE + 1])
    del data[: len(line)]
    return line


def refused(reason: str) -> Reply:
    return {"ok": False, "reason": reason[:1000]}


def _engines_folder(root: Path) -> int:
    """A descriptor of `<root>/.refitd/engines`, made if only that last part is missing. Links are not followed."""
    top = open_folder(root, follow=True)
    try:
        service = open_folder(SERVICE_FOLDER, within=top)
    finally:
        os.close(top)
    try:
        with suppress(FileExistsError):
            os.mkdir(ENGINES_FOLDER, 0o770, dir_fd=service)
            os.chmod(ENGINES_FOLDER, 0o770, dir_fd=service)  # noqa: S103 - the group shares it, whatever the umask
        return open_folder(ENGINES_FOLDER, within=service)
    finally:
        os.close(service)
