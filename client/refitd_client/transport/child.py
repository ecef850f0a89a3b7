"""A sender, receiver or member process: as its parent has it, and its own loop. Its parent may kill it at any moment.

An order is one message of JSON over a pair of sockets, and so is its reply; `StopWaiting` has no reply, it ends the
waiting of the order that is under way. The process ends when its parent does: the socket says so, and where a copy of
the parent's end lives on in some other process, the parent's pid.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event, Lock
from typing import Literal

import msgspec

from refitd_client.contract.decoding import json_decoder
from refitd_client.transport.offer import GroupTransfer, OfferLayout
from refitd_client.transport.script import ShardTable

MAX_REPLY = 2**20  # bytes
PROGRAM = "refitd_client.transport.processes"
_CHILD_TURN_SECONDS = 0.1
_CHILD_LOOK_SECONDS = 1.0
_MESSAGE_SECONDS = 15  # for the bytes of one message: an order with many names is more than a socket takes at once
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

    `group` is the group's name, `size` the number of its ranks; with NCCL, `device` is the number of the GPU. The
    backend `vllm` is NCCL in a group as vLLM's weight transfer makes it; `unique_id` is NCCL's in base64, where the
    trainer has sent it and makes no store. `within` as above.
    """

    address: str
    port: int
    group: str
    rank: int
    size: int
    backend: Literal["gloo", "nccl", "vllm"]
    device: int
    within: float
    unique_id: str = ""


NamedTensor = tuple[str, str, tuple[int, ...]]
"""A tensor's name, its dtype as safetensors name it, and its shape."""


class TakeTensors(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a member: take part in the broadcasts of these tensors, in turn.

    `file` is a safetensors file that is made of them, "" where they are dropped. With `chunk` 0 each tensor is a
    broadcast. Else tensors are packed side by side, until they are more than `chunk` bytes. `within` as above.
    """

    tensors: list[NamedTensor]
    file: str
    within: float
    chunk: int = 0


class TakePatches(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a member: take part in the broadcasts of patches, in turn: of each tensor the flat indices and the values.

    `tensors` are those that change, and `counts` how many of their elements. `files` are the safetensors files that
    have them, which are changed in place; none where the patches are dropped. `within` as above.
    """

    tensors: list[NamedTensor]
    counts: list[int]
    files: list[str]
    within: float


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous tensor in another process's GPU memory, as torch's `reduce_tensor` describes it.

    `handle` is that of an allocation (CUipcMemHandle), in which the tensor begins at byte `offset`. `counter` is where
    torch counts who may read there: a file of shared memory, and a number in it. `event` is a handle of what the GPU
    has to do before, b"" for nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    handle: bytes
    offset: int
    counter: tuple[str, int]
    event: bytes


class TakeHandles(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To a member: copy these tensors from other processes' GPU memory into a safetensors file that is made.

    `handles` has, by the id of the GPU, a handle of each tensor; or one of a buffer in which they lie side by side, and
    which the orders that follow may name again. All of them count as read afterwards, also those that are not needed.
    """

    tensors: list[NamedTensor]
    handles: list[dict[str, MemoryHandle]]
    is_packed: bool
    file: str


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
    """The order was not carried out, and why. `in_step`: the member has taken part, and can carry out the next one."""

    reason: str
    in_step: bool = False


Order = Open | Send | Receive | LookAround | JoinGroup | TakeTensors | TakePatches | TakeHandles
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
        self._line: Connection | None = None
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
        """Give an order, and wait for the reply. `within`: seconds after which the process is ended. `stop`: once set,
        the process is asked to stop waiting, and ended if it does not. Raises ChildLostError: there is no reply.
        """
        with self._turn:
            try:
                return self._asked(order, within, stop)
            except OSError as error:
                self._end()
                raise ChildLostError(f"the process that {self._role}s cannot be used: {error}") from error
            except (ChildLostError, EOFError, msgspec.MsgspecError) as error:
                self._end()
                why = "its end of the socket is closed" if isinstance(error, EOFError) else error
                raise ChildLostError(f"the process that {self._role}s has ended: {why}") from error

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
        deadline, told = time.monotonic() + within + _GRACE_SECONDS, False
        line.send_bytes(msgspec.json.encode(order))
        while not line.poll(_CHILD_TURN_SECONDS):
            if stop is not None and stop.is_set() and not told:
                line.send_bytes(msgspec.json.encode(StopWaiting()))
                deadline, told = min(deadline, time.monotonic() + _STOP_SECONDS), True
            if time.monotonic() > deadline:
                raise ChildLostError("it did not stop" if told else f"it did not answer in {within:g} s")
        return _REPLIES.decode(line.recv_bytes(MAX_REPLY))

    def _spawn(self) -> Connection:
        mine, its = socket.socketpair()
        path = os.pathsep.join(dict.fromkeys(each for each in sys.path if each))
        with mine, its:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and no words from outside
                [sys.executable, "-P", "-m", PROGRAM, self._role, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(os.environ) | {"PYTHONPATH": path} | self._environment,
                start_new_session=True,  # signals that a terminal sends are not for it
            )
            return self._connected(mine)

    def _connected(self, mine: socket.socket) -> Connection:
        """The parent's end. A process that is stopped in the middle of a message holds it up for a while alone."""
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            mine.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _MESSAGE_SECONDS, 0))
        self._line, self.begun = Connection(mine.detach()), self.begun + 1
        return self._line

    def _end(self) -> None:
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)


Work = Callable[[Order, Callable[[], bool]], Reply]
"""Carries out an order; is given it, and what says that its waiting was stopped."""


def serve(line: Connection, work: Work, end: Callable[[], None]) -> None:
    """Carry out orders until the parent is gone; then the process ends, whatever it does. `work`: carries out one
    order. It raises nothing. `end`: removes what would outlive the process.
    """
    stopped, orders, parent = Event(), SimpleQueue[Order](), os.getppid()

    def carry_out() -> None:
        with suppress(OSError):  # the other thread sees it as well, and ends the process
            while True:
                line.send_bytes(msgspec.json.encode(work(orders.get(), stopped.is_set)))

    threading.Thread(target=carry_out, name="refitd-group", daemon=True).start()
    try:
        while os.getppid() == parent:
            if not line.poll(_CHILD_LOOK_SECONDS):
                continue
            message = _ORDERS.decode(line.recv_bytes())
            if isinstance(message, StopWaiting):
                stopped.set()
            else:
                stopped.clear()
                orders.put(message)
    finally:
        with suppress(Exception):
            end()
        os._exit(0)
