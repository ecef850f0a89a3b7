"""A process as a member of a process group: the store where members meet, the group, and its broadcasts.

The store is the sender's (torch's TCPStore), so it ends with it. Groups are made without torch's default group: a
process may be in several, one after the other, and those of the trainer or the engine are never touched.

Every call has a deadline. One that NCCL does not keep (a kernel that waits for a dead peer) is kept by the parent of
this process, which ends it.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as distributed

from refitd_client.contract.decoding import from_json
from refitd_client.transport.group.host import own_address
from refitd_client.transport.group.transfer import IN_FLIGHT, SENDER, Backend, Go

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
        """Seconds until the deadline, at least a millisecond.

        Raises:
            TransferError: the deadline has passed, or the wait was stopped.
        """
        if self._stopped():
            raise TransferError("it was stopped")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TransferError("its time was over")
        return max(left, 0.001)


def open_store(host: str) -> tuple[Any, int]:
    """The sender's store, on a free port of one address of this host.

    Returns:
        The store and its port.

    Raises:
        OSError: the address is not one of this host's.
    """
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def join_store(host: str, port: int, waiting: WaitLimit) -> Any:
    """The sender's store, from a receiver.

    Raises:
        TransferError: it cannot be reached.
    """
    try:
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=waiting.left())
        )
    except RuntimeError as error:  # torch's DistNetworkError is one
        raise TransferError(f"the sender's store at {host}:{port} cannot be reached: {first_line(error)}") from error


def say(store: Any, key: str, word: msgspec.Struct) -> None:
    """Write a word for the others.

    Raises:
        TransferError: the store is gone.
    """
    try:
        store.set(key, msgspec.json.encode(word).decode())
    except RuntimeError as error:
        raise TransferError(f"the sender's store is gone: {first_line(error)}") from error


def hear(store: Any, key: str, kind: type[Word], waiting: WaitLimit) -> Word:
    """Wait for a word of another member.

    Raises:
        TransferError: it has not come in time, or the store is gone.
    """
    while True:
        try:
            store.wait([key], timedelta(seconds=min(waiting.left(), _SLICE_SECONDS)))
            return from_json(store.get(key), kind)
        except dist.DistStoreError:  # a time-out
            continue
        except (RuntimeError, msgspec.MsgspecError) as error:
            raise TransferError(f"the sender's store is gone: {first_line(error)}") from error


class BroadcastGroup:
    """One process group, in which the rank `SENDER` sends. All members make it at the same time."""

    def __init__(self, backend: Backend, store: Any, go: Go, rank: int, host: str, waiting: WaitLimit) -> None:
        """Join it.

        Args:
            backend: `gloo` or `nccl`; with `nccl` on the first GPU that this process sees.
            store: the sender's.
            go: which group it is, and who its members are.
            rank: this member's.
            host: the address of the sender's store: Gloo takes the address of this host from which it is reached.
            waiting: until when all have to have joined.

        Raises:
            TransferError: not all have joined in time.
        """
        self.number, size = go.group, len(go.ranks) + 1
        self._backend: Backend = backend
        prefix = dist.PrefixStore(f"group/{go.group}", store)
        try:
            joining = waiting.at_most(MAKE_SECONDS)
            if backend == "gloo":
                self._group = _gloo(prefix, rank, size, host, go.streams, joining.left())
            else:
                self._group = _nccl(prefix, rank, size, joining.left())
            self._agree(joining)
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"the {backend} group of {size} was not made: {first_line(error)}") from error

    def broadcast(
        self, blocks: Iterable[torch.Tensor], waiting: WaitLimit, arrived: Callable[[int], None] = lambda _: None
    ) -> None:
        """Send the blocks in turn, or receive into them. At most `IN_FLIGHT` are under way beside the next.

        Args:
            blocks: contiguous tensors of bytes.
            waiting: until when all have to have arrived.
            arrived: is called with the number of each block that was sent or has arrived, in turn. With `nccl` only
                what this process's stream does after it sees the block.

        Raises:
            TransferError: a member is gone, or the time was over. The group is of no use any more.
        """
        under_way: deque[tuple[int, Any]] = deque()

        def finish() -> None:
            number, work = under_way.popleft()
            self.end(work, waiting)
            arrived(number)

        with _failing():  # what fills the blocks, and what is done with them, may fail as well
            for number, block in enumerate(blocks):
                if len(under_way) == IN_FLIGHT[self._backend]:
                    finish()
                under_way.append((number, self.begin(block)))
            while under_way:
                finish()
        self.settle()

    def begin(self, block: torch.Tensor) -> Any:
        """Begin to send a block, or to receive into it. Returns what `end` waits for.

        Raises:
            TransferError: as `broadcast`.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        with _failing():
            return self._group.broadcast([block], options)

    def end(self, work: Any, waiting: WaitLimit) -> None:
        """Wait until a block was sent or has arrived; with `nccl` only what this process's stream does next waits.

        Raises:
            TransferError: as `broadcast`.
        """
        with _failing():
            if self._backend == "nccl":
                work.wait()  # orders this stream after the broadcast, and does not wait for it
            else:
                work.wait(timedelta(seconds=waiting.left()))

    def settle(self) -> None:
        """Wait until all has arrived that `end` was called for.

        Raises:
            TransferError: as `broadcast`.
        """
        if self._backend == "nccl":
            with _failing():
                torch.cuda.synchronize()

    def close(self) -> None:
        """Leave. Other members that wait in it get an error, where the backend can tell them."""
        if self._backend == "nccl":
            self._group.abort()
        del self._group

    def _agree(self, waiting: WaitLimit) -> None:
        """Send one byte: NCCL joins only with the first broadcast, which would otherwise be the first block's time."""
        device = "cuda" if self._backend == "nccl" else "cpu"
        self.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], waiting)


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


def _nccl(store: Any, rank: int, size: int, within: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=within)  # noqa: SLF001 - as above
    return dist.ProcessGroupNCCL(store, rank, size, options)


def first_line(error: Exception) -> str:
    """The first line of torch's message, which goes on with a stack of C++ functions."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
