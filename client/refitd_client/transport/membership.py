"""A process as a member of lanes: the store where members meet, the lanes' groups, and the script that it follows.

The store is the first sender's (torch's TCPStore), so it ends with it. Groups are made without torch's default group: a
process may be in several, and those of the trainer or the engine are never touched.

A group is made in the order of the lanes' numbers, and blocks go in the order of the script, on all members: so no two
wait for each other. The groups are kept until another number is named, or one has failed.

Every call has a deadline. One that NCCL does not keep (a kernel that waits for a dead peer) is kept by the parent of
this process, which ends it.
"""

import socket
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as distributed

from refitd_client.contract.decoding import from_json
from refitd_client.transport.memory import own_address
from refitd_client.transport.needs import PackedPlaces
from refitd_client.transport.offer import GroupTransfer, side_by_side
from refitd_client.transport.script import (
    BLOCK_BYTES,
    IN_FLIGHT,
    MOST_LANES,
    SENDER,
    Backend,
    BlockWord,
    Go,
    MemberScript,
    key,
)

dist: Any = distributed  # torch's types leave out what a process group without a default group needs
Word = TypeVar("Word", bound=msgspec.Struct)
MAKE_SECONDS = 20.0  # in which all members that were ready are to have joined a group: else one is gone
_SLICE_SECONDS = 0.25  # of a wait, after which it is looked at whether the wait is still wanted


class TransferError(Exception):
    """A transfer that has failed, or was not begun. The message is a sentence."""


class WaitLimit:
    """How long this process waits, and whether it is still to: `stopped` says that it is not."""

    def __init__(self, seconds: float, stopped: Callable[[], bool]) -> None:
        self._deadline, self._stopped = time.monotonic() + seconds, stopped

    def at_most(self, seconds: float) -> "WaitLimit":
        """The same with a deadline that is so near, unless it is nearer."""
        return WaitLimit(min(seconds, max(self._deadline - time.monotonic(), 0.0)), self._stopped)

    def left(self) -> float:
        """Seconds until the deadline, at least a millisecond. Raises TransferError: the deadline has passed, or the
        wait was stopped.
        """
        if self._stopped():
            raise TransferError("it was stopped")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TransferError("its time was over")
        return max(left, 0.001)


def open_store(host: str) -> tuple[Any, int]:
    """The sender's store, on a free port of one address of this host. Returns the store and its port. Raises OSError:
    the address is not one of this host's.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def join_store(host: str, port: int, waiting: WaitLimit) -> Any:
    """The sender's store, from a receiver. Raises TransferError: it cannot be reached."""
    try:
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=waiting.left())
        )
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise TransferError(f"the sender's store at {host}:{port} cannot be reached: {first_line(error)}") from error


def say(store: Any, name: str, word: msgspec.Struct) -> None:
    """Write a word for the others. Raises TransferError: the store is gone."""
    try:
        store.set(name, msgspec.json.encode(word).decode())
    except RuntimeError as error:
        raise TransferError(f"the sender's store is gone: {first_line(error)}") from error


def hear(store: Any, name: str, kind: type[Word], waiting: WaitLimit) -> Word:
    """Wait for a word of another member. Raises TransferError: it has not come in time, or the store is gone."""
    while True:
        try:
            store.wait([name], timedelta(seconds=min(waiting.left(), _SLICE_SECONDS)))
            return from_json(store.get(name), kind)
        except dist.DistStoreError:  # a time-out
            continue
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise TransferError(f"the sender's store is gone: {first_line(error)}") from error


class BroadcastGroup:
    """The process group of one lane, in which the rank `SENDER` sends. All members make it at the same time."""

    def __init__(
        self,
        backend: Backend,
        store: Any,
        number: int,
        rank: int,
        size: int,
        host: str,
        streams: int,
        waiting: WaitLimit,
    ) -> None:
        """Join it.

        Args:
            backend: `gloo` or `nccl`; with `nccl` on the first GPU that this process sees.
            number: the group's, which no other group has.
            host: the address of the first sender's store: Gloo takes the address of this host from which it is reached.
            streams: connections between any two members, over Gloo.

        Raises:
            TransferError: not all have joined in time.
        """
        self._backend: Backend = backend
        prefix = dist.PrefixStore(f"group/{number}", store)
        try:
            joining = waiting.at_most(MAKE_SECONDS)
            if backend == "gloo":
                self._group = _gloo(prefix, rank, size, host, streams, joining.left())
            else:
                self._group = nccl_group(prefix, rank, size, joining.left())
            # One byte: NCCL joins only with the first broadcast, which would otherwise be the first block's time.
            device = "cuda" if backend == "nccl" else "cpu"
            self.end(self.begin(torch.zeros(1, dtype=torch.uint8, device=device)), joining)
            self.settle()
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"the {backend} group of {size} was not made: {first_line(error)}") from error

    def begin(self, block: torch.Tensor) -> Any:
        """Begin to send a block, or to receive into it. Returns what `end` waits for. Raises TransferError: a member is
        gone. The group is of no use any more.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        with _failing():
            return self._group.broadcast([block], options)

    def end(self, work: Any, waiting: WaitLimit) -> None:
        """Wait until a block was sent or has arrived; with `nccl` only what this process's stream does next waits.
        Raises TransferError: a member is gone, or the time was over.
        """
        with _failing():
            if self._backend == "nccl":
                work.wait()  # orders this stream after the broadcast, and does not wait for it
            else:
                work.wait(timedelta(seconds=waiting.left()))

    def settle(self) -> None:
        """Wait until all has arrived that `end` was called for. Raises TransferError: a member is gone."""
        if self._backend == "nccl":
            with _failing():
                torch.cuda.synchronize()

    def close(self) -> None:
        """Leave. Other members that wait in it get an error, where the backend can tell them."""
        if self._backend == "nccl":
            self._group.abort()
        del self._group


class FlatMemory:
    """Pieces of memory that count as one: they begin at the offsets that `side_by_side` gives to their sizes."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        """`pieces` are bytes, in one dimension each."""
        self._pieces = pieces
        offsets, self.nbytes = side_by_side(len(piece) for piece in pieces)
        self._offsets = offsets

    def rows(self, offset: int, pitch: int, width: int, rows: int) -> torch.Tensor:
        """A view of `rows` rows of `width` bytes, the first from an offset on, `pitch` bytes apart. Raises
        TransferError: they are not in one of the pieces.
        """
        number = max(bisect_right(self._offsets, offset) - 1, 0)
        piece, begin = self._pieces[number], offset - self._offsets[number]
        if begin + (rows - 1) * pitch + width > len(piece):
            raise TransferError(f"a move goes beyond the {len(piece)} bytes of a piece of this member's memory")
        return torch.as_strided(piece, (rows, width), (pitch, 1), piece.storage_offset() + begin)


class LaneMember:
    """One sender's or receiver's lanes. `number` is that of the lanes that it holds, 0 for none; `store` is where the
    members meet.
    """

    def __init__(self) -> None:
        self.number = 0
        self.store: Any = None
        self._address: tuple[str, int] | None = None
        self._script = MemberScript()
        self._packed: tuple[PackedPlaces, MemberScript] | None = None
        self._groups: list[BroadcastGroup] = []
        self._ring: list[torch.Tensor] = []

    def connect(self, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        """Connect to the first sender's store. Another one has no lanes of ours. Raises TransferError."""
        if self._address != (address := (transfer.host, transfer.port)):
            self.leave()
            self._address, self.store = None, join_store(*address, waiting)
            self._address = address

    def follow(self, go: Go, name: str, transfer: GroupTransfer, waiting: WaitLimit) -> None:
        """Be a member of the lanes that `go` names: those that stand, or new ones. Raises TransferError: there is no
        script for this member, or not all have joined in time.
        """
        if self.number == go.group:
            return
        self.leave()
        self._script = hear(self.store, key(f"lanes {go.group}", "script", name), MemberScript, waiting)
        for lane in self._script.lanes:
            if name not in lane.members:
                raise TransferError("the script is another member's")
            number, rank, size = go.group * MOST_LANES + lane.number, lane.members.index(name), len(lane.members)
            group = BroadcastGroup(transfer.backend, self.store, number, rank, size, transfer.host, go.streams, waiting)
            self._groups.append(group)
        self.number = go.group

    def run(
        self,
        memory: FlatMemory,
        backend: Backend,
        waiting: WaitLimit,
        *,
        sends: bool,
        places: PackedPlaces | None = None,
    ) -> int:
        """Do all that the script says. Returns the bytes that this member's lanes have brought to their receivers.
        `places`: where tensors lie in a receiver's memory that has not the whole version. Raises TransferError: the
        script goes beyond the memory, a member is gone, or the time was over.
        """
        script = self._script if places is None else self._packed_by(places)
        if (fault := script.fault(memory.nbytes)) is not None:
            raise TransferError(f"the script cannot be followed: {fault}")
        under_way: deque[tuple[BroadcastGroup, Any, Callable[[], None]]] = deque()

        def finish() -> None:
            group, work, arrived = under_way.popleft()
            group.end(work, waiting)
            arrived()

        try:
            for number, block in enumerate(script.blocks):
                if len(under_way) == IN_FLIGHT[backend]:
                    finish()
                sent, arrived = self._block(number, block, memory, backend, sends=sends)
                group = self._groups[block.lane]
                under_way.append((group, group.begin(sent), arrived))
            while under_way:
                finish()
        except RuntimeError as error:  # of a copy
            raise TransferError(f"a block could not be copied: {error}") from error
        for group in self._groups:
            group.settle()
        return script.delivered

    def leave(self) -> None:
        """Leave all lanes. Members that wait in one get an error, where the backend can tell them."""
        groups, self._groups, self.number, self._packed = self._groups, [], 0, None
        for group in groups:
            group.close()

    def _packed_by(self, places: PackedPlaces) -> MemberScript:
        if self._packed is None or self._packed[0] is not places:
            self._packed = places, places.of(self._script)
        return self._packed[1]

    def _block(
        self, number: int, block: BlockWord, memory: FlatMemory, backend: Backend, *, sends: bool
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """What is broadcast, and what is to be done when it has arrived."""
        device = "cuda" if backend == "nccl" else "cpu"
        views = [memory.rows(*move) for move in block.moves]
        if len(views) == 1 and len(views[0]) == 1 and views[0].device.type == device:
            return views[0][0], lambda: None
        slot = self._slot(number, backend, device)[: block.nbytes]
        if sends:
            _copy(views, slot, pack=True)
            return slot, lambda: None
        return slot, lambda: _copy(views, slot, pack=False)

    def _slot(self, number: int, backend: Backend, device: str) -> torch.Tensor:
        """Memory for a block, which is used again when that has ended."""
        if not self._ring or self._ring[0].device.type != device:
            pinned = device == "cpu" and torch.cuda.is_available()
            self._ring = [
                torch.empty(BLOCK_BYTES[backend], dtype=torch.uint8, device=device, pin_memory=pinned)
                for _ in range(IN_FLIGHT[backend] + 1)
            ]
        return self._ring[number % len(self._ring)]


def _copy(views: Sequence[torch.Tensor], packed: torch.Tensor, *, pack: bool) -> None:
    at = 0
    for here in views:
        there = packed[at : at + here.numel()].view(here.shape)
        _ = there.copy_(here) if pack else here.copy_(there)
        at += here.numel()


@contextmanager
def _failing() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferError(f"a broadcast has failed: {first_line(error)}") from error


def _gloo(store: Any, rank: int, size: int, host: str, streams: int, within: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch offers no other way to choose the address
    options._timeout, options._threads = timedelta(seconds=within), IN_FLIGHT["gloo"]  # noqa: SLF001 - as above
    # torch gives each broadcast to the next device in turn. A device has connections and a thread of its own.
    devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host)) for _ in range(streams)]
    options._devices = devices  # noqa: SLF001 - as above
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, within: float) -> Any:
    """A group on the current GPU. It is made with the first operation."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=within)  # noqa: SLF001 - as above
    return dist.ProcessGroupNCCL(store, rank, size, options)


def first_line(error: Exception) -> str:
    """The first line of torch's message, which goes on with a stack of C++ functions."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
