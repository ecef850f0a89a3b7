"""A sender, receiver or member process: as its parent has it, and its own loop. Its parent may kill it at any moment.

Parent and process have a socket each of a pair. An order is one line of JSON, and so is its reply; `StopWaiting` has no
reply, it ends the waiting of the order that is under way. The process ends when its parent does: the socket says so,
and where a copy of the parent's end lives on in some other process, the parent's pid.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import Event, Lock
from typing import Literal

import msgspec

from refitd_client.contract.decoding import json_decoder
from refitd_client.transport.offer import GroupTransfer, OfferLayout
from refitd_client.transport.script import ShardTable

MAX_LINE = 2**20  # bytes
PROGRAM = "refitd_client.transport.processes"
_CHILD_TURN_SECONDS = 0.1
_CHILD_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0  # until a process that was told to stop is ended
_GRACE_SECONDS = 5.0  # beyond the time of an order, until it is ended


class Open(msgspec.Struct, tag=True, frozen=True):
    """To a sender: open the store, at this address of the host."""

    host: str


class Send(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a sender: send what its trainer process has.

    `number` is the sender's, 0 for the one that has the store. `layout` says where its bytes lie, in pieces that follow
    each other; it may read them until it has replied. `table` is what sender 0 plans from, None for the others.
    `within` and `join` are seconds, for all and for the others to come.
    """

    transfer: GroupTransfer
    number: int
    layout: OfferLayout
    table: ShardTable | None
    within: float
    join: float


class Receive(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a receiver: receive the tensors of an offer, and offer them in `folder`. `within` as above.

    `root` is the folder beneath which `offer` is the path of the offer's file. `name` is the receiver's in the
    transfer; `on_device`: it keeps them on its GPU, where there is room. `needs` is the digest of what it needs, "" for
    everything.
    """

    root: str
    offer: str
    name: str
    folder: str
    within: float
    on_device: bool
    needs: str = ""


class LookAround(msgspec.Struct, tag=True, frozen=True):
    """To a member: say which backends and how many GPUs it could use."""


class JoinGroup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a member: join the group that a trainer makes, with its store at this address, as one of its ranks.

    `group` is the group's name, `size` the number of its ranks; with `nccl`, `device` is the number of the GPU.
    `within` as above.
    """

    address: str
    port: int
    group: str
    rank: int
    size: int
    backend: Literal["gloo", "nccl"]
    device: int
    within: float


class TakeTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a member: take part in one broadcast for each tensor, in turn.

    `tensors` are (name, safetensors' dtype, shape); `file` is a safetensors file that is made of them, "" where they
    are dropped. `within` as above.
    """

    tensors: list[tuple[str, str, tuple[int, ...]]]
    file: str
    within: float


class StopWaiting(msgspec.Struct, tag=True, frozen=True):
    """Stop waiting."""


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The store is open."""

    port: int


class TransferSent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What the receivers have said: "" or why one has nothing. `ms` are milliseconds by stage. `nbytes` are the
    bytes that were brought to receivers: what several of them get counts for each.
    """

    refused: dict[str, str]
    ms: dict[str, float]
    nbytes: int = 0


class Received(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """All has arrived: `offer` is the name of the file in the folder that offers it. `ms` as above."""

    offer: str
    ms: dict[str, float]


class Surroundings(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a member could use: the backends of its torch, and the number of GPUs."""

    backends: list[str]
    gpus: int


class MemberReady(msgspec.Struct, tag=True, frozen=True):
    """The member is in the group, or has what was broadcast."""


class OrderFailed(msgspec.Struct, tag=True, frozen=True):
    """The order was not carried out, and why."""

    reason: str


Order = Open | Send | Receive | LookAround | JoinGroup | TakeTensors
Reply = Opened | TransferSent | Received | Surroundings | MemberReady | OrderFailed
_ORDERS: msgspec.json.Decoder[Order | StopWaiting] = json_decoder(Order | StopWaiting)
_REPLIES: msgspec.json.Decoder[Reply] = json_decoder(Reply)


class ChildLostError(Exception):
    """The process has ended, or was ended: it did not answer in time. The message is a sentence."""


class GroupChild:
    """A process as its parent has it, begun with the first order and again after it was lost. One order at a time.

    `begun` counts how often.
    """

    def __init__(self, role: Literal["send", "receive", "join"], environment: Mapping[str, str] | None = None) -> None:
        self._role, self._environment = role, dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._turn = Lock()
        self.begun = 0

    @property
    def is_running(self) -> bool:
        """Whether there is a process. What it knows of the orders before is gone where `begun` has changed."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, order: Order, within: float, stop: Event | None = None) -> Reply:
        """Give an order, and wait for the reply.

        Args:
            within: seconds after which the process is ended.
            stop: once set, the process is told to stop waiting, and ended if it does not.

        Raises:
            ChildLostError: there is no reply.
        """
        with self._turn:
            try:
                return self._asked(order, within, stop)
            except OSError as error:
                self._end()
                raise ChildLostError(f"the process that {self._role}s cannot be used: {error}") from error
            except (ChildLostError, msgspec.MsgspecError) as error:
                self._end()
                raise ChildLostError(f"the process that {self._role}s has ended: {error}") from error

    def end(self) -> None:
        """End the process, also in the middle of an order."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        with self._turn:
            self._end()

    def _asked(self, order: Order, within: float, stop: Event | None) -> Reply:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was killed since the last order: another one carries this out
        line = self._line or self._spawn()
        deadline, data, told = time.monotonic() + within + _GRACE_SECONDS, bytearray(), False
        line.settimeout(within + _GRACE_SECONDS)  # an order with many names is more than a socket takes at once
        line.sendall(msgspec.json.encode(order) + b"\n")
        line.settimeout(_CHILD_TURN_SECONDS)
        while not data.endswith(b"\n"):
            with suppress(TimeoutError):
                part = line.recv(MAX_LINE)
                if not part:
                    raise ChildLostError("its end of the socket is closed")
                data += part
            if stop is not None and stop.is_set() and not told:
                line.sendall(msgspec.json.encode(StopWaiting()) + b"\n")
                deadline, told = min(deadline, time.monotonic() + _STOP_SECONDS), True
            if len(data) > MAX_LINE:
                raise ChildLostError(f"it answered with more than {MAX_LINE} bytes")
            if time.monotonic() > deadline:
                raise ChildLostError("it did not stop" if told else f"it did not answer in {within:g} s")
        return _REPLIES.decode(data)

    def _spawn(self) -> socket.socket:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.pathsep.join(dict.fromkeys(each for each in sys.path if each))
        try:
            with its:
                self._process = subprocess.Popen(  # noqa: S603 - this Python, and no words from outside
                    [sys.executable, "-P", "-m", PROGRAM, self._role, str(its.fileno())],
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=dict(os.environ) | {"PYTHONPATH": path} | self._environment,
                    start_new_session=True,  # signals that a terminal sends are not for it
                )
        except BaseException:
            mine.close()
            raise
        mine.settimeout(_CHILD_TURN_SECONDS)
        self._line, self.begun = mine, self.begun + 1
        return mine

    def _end(self) -> None:
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)


Work = Callable[[Order, Callable[[], bool]], Reply]
"""Carries out an order; is given it, and what says that its waiting was stopped."""


def serve(line: socket.socket, work: Work, end: Callable[[], None]) -> None:
    """Carry out orders until the parent is gone; then the process ends, whatever it does.

    Args:
        work: carries out one order. It raises nothing.
        end: removes what would outlive the process.
    """
    stopped = Event()
    orders: list[Order] = []
    there = threading.Condition()

    def carry_out() -> None:
        while True:
            with there:
                there.wait_for(lambda: orders)
                order = orders.pop(0)
            reply = work(order, stopped.is_set)
            try:
                line.sendall(msgspec.json.encode(reply) + b"\n")
            except OSError:
                return  # the other thread sees it as well, and ends the process

    threading.Thread(target=carry_out, name="refitd-group", daemon=True).start()
    try:
        for message in _messages(line):
            if isinstance(message, StopWaiting):
                stopped.set()
                continue
            stopped.clear()
            with there:
                orders.append(message)
                there.notify()
    finally:
        with suppress(Exception):
            end()
        os._exit(0)


def _messages(line: socket.socket) -> Iterator[Order | StopWaiting]:
    parent, data = os.getppid(), bytearray()
    poll = select.poll()
    poll.register(line, select.POLLIN | select.POLLHUP)
    while os.getppid() == parent:
        if not poll.poll(_CHILD_LOOK_SECONDS * 1000):
            continue
        part = line.recv(MAX_LINE)
        if not part:
            return
        data += part
        if b"\n" not in part:  # an order with many names comes in many parts
            continue
        while (end := data.find(b"\n")) >= 0:
            yield _ORDERS.decode(data[:end])
            del data[: end + 1]
