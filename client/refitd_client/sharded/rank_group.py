"""The ranks of a publication: rank 0 asks, each other rank answers, over a CPU process group (gloo).

Rank 0 sends orders, the others answer each with one reply.

All messages go between rank 0 and one other rank, never from all to all. So a rank that waits knows which one it waits
for, and an answer is due for every question. After a failure the connections between rank 0 and the living ranks are
still in step: rank 0 receives all answers that can still come before it tells the ranks how it ended.

gloo reports a process that died at once. One that hangs is given up after the timeout; gloo then closes every
connection of the group, so the rank group is broken and a new publisher has to be opened, as after a death.

An error of one rank is raised on all of them, with the rank's number, and of the same class where a caller may want to
tell it apart.
"""

import pickle
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from refitd_client.errors import (
    NO_SPACE,
    InvalidWeightsError,
    NoSpaceError,
    PublishError,
    RankLostError,
    ServiceError,
    StorageError,
)
from refitd_client.publish.options import is_timeout
from refitd_client.sharded.layout import ranks_named
from refitd_client.sharded.orders import FailedReply

_LEAD_PATIENCE = 4.0  # times the timeout that others wait for rank 0, which may itself be waiting for a rank
_USUAL_TIMEOUT = 300.0
_LARGE = 2**16  # bytes of an array from which on a part of its own costs less than a copy
_SOURCE = re.compile(r"^\[[^\]\s]*\]\s*")
_TORCH_ADVICE = re.compile(r"[.\s]*(This is typically|This means|Check the logs|GLHF).*")


class RankGroup:
    """This rank's connections. `rank` and `size` are those in the group; `broken` says why it cannot be used again."""

    def __init__(self, process_group: Any, timeout: float) -> None:
        """Join. Without a group it is all ranks, which make a group of their own for this: a collective call.

        A `timeout` that is none is taken for the usual one: the ranks need the group to hear of it. Raises
        PublishError: torch.distributed is not initialised, a rank does not come, or the group cannot carry CPU tensors.
        """
        import torch
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise PublishError(
                "torch.distributed is not initialised: call init_process_group first, or leave ranks= out where there "
                "is one process"
            )
        self._distributed: Any = distributed
        self._timeout = timeout = timeout if is_timeout(timeout) else _USUAL_TIMEOUT
        self._is_own = process_group is None
        if process_group is None:
            longest = timedelta(seconds=timeout * _LEAD_PATIENCE * 2)  # each wait has its own, shorter one
            try:
                process_group = self._distributed.new_group(backend="gloo", timeout=longest)
            except RuntimeError as error:  # torch does not say which rank it missed
                raise PublishError(
                    f"not every rank opened its publisher within {longest.total_seconds():g} s: all ranks of the "
                    f"trainer do, or those of a process_group that is passed ({reason_of(error)})"
                ) from error
        self._group: Any = process_group
        if "cpu:" not in self._distributed.get_backend_config(self._group):
            raise PublishError(
                "process_group carries GPU tensors only: pass one made with new_group(ranks, backend='gloo') on every "
                "process, or none for all ranks"
            )
        ranks: list[int] = list(self._distributed.get_process_group_ranks(self._group))
        self.rank: int = ranks.index(self._distributed.get_rank())
        self.size = len(ranks)
        self._messages = RankMessages(torch, self._distributed, self._group, ranks)
        self._owed: dict[int, Any] = {}  # ranks that answer and were not heard, with what was begun to receive it
        self.broken: str | None = None

    def close(self) -> None:
        """Destroy the group if it was made for this."""
        if self._is_own and self._group is not None and self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)
        self._group = None

    def require_whole(self) -> None:
        """Check that the group can be used. Raises PublishError: a rank was lost before, or the publisher is closed."""
        if self._group is None:
            raise PublishError("this publisher is closed: open another")
        if self.broken is not None:
            raise PublishError(f"this publisher cannot be used any more ({self.broken}): open another on every rank")

    def tell(self, message: Any, longer: float = 0.0) -> None:
        """Send rank 0 an answer. `longer` as for `hear`. Raises RankLostError: rank 0 is gone, or does not listen in
        time.
        """
        try:
            self._messages.send(message, 0, self._timeout * _LEAD_PATIENCE + longer)
        except RuntimeError as error:
            raise self._lost_lead(error) from error

    def hear(self, longer: float = 0.0) -> Any:
        """Receive the next message from rank 0. `longer` are seconds that rank 0 may wait for others than ranks. Raises
        RankLostError: rank 0 is gone, or sends nothing in time.
        """
        try:
            return self._messages.receive(self._messages.expect(0), 0, self._timeout * _LEAD_PATIENCE + longer)
        except RuntimeError as error:
            raise self._lost_lead(error) from error

    def hear_all(self, own: Any, doing: str) -> list[Any]:
        """Receive the answers of all ranks, with `own` as rank 0's. Only rank 0 calls it. Raises RankLostError: a rank
        is gone or late with `doing`. The other answers were received, so those ranks are in step.
        """
        ends = time.monotonic() + self._timeout
        answers: list[Any] = [own]
        lost: dict[int, RuntimeError] = {}
        self._owed = {}
        for rank in range(1, self.size):
            try:
                self._owed[rank] = self._messages.expect(rank)
            except RuntimeError as error:
                lost[rank] = error
        for rank in list(self._owed):
            try:
                each = self._owed.pop(rank)
                answers.append(self._messages.receive(each, rank, max(0.1, ends - time.monotonic())))
            except RuntimeError as error:
                lost[rank] = error
        if lost:
            raise self._lost(lost, doing)
        return answers

    def tell_all(self, messages: Sequence[Any], *, are_orders: bool = False) -> None:
        """Send each other rank its message (by rank), also after one of them is found to be gone.

        Where `are_orders`, those who get one answer it. Before what is no order, such as the end of a publication,
        answers are received that were not heard, since another rank was lost meanwhile: one that answers does not
        listen. Raises RankLostError: a rank is gone, or does not listen.
        """
        lost: dict[int, RuntimeError] = {}
        if not are_orders:
            self._pass_over()
        for rank in range(1, self.size):
            try:
                self._messages.send(messages[rank], rank, self._timeout)
            except RuntimeError as error:
                lost[rank] = error
            else:
                if are_orders:
                    self._owed[rank] = None
        if lost:
            raise self._lost(lost, "listen")

    def _pass_over(self) -> None:
        """Receive the answers that were not heard."""
        ends = time.monotonic() + self._timeout
        while self._owed:
            rank, expected = self._owed.popitem()
            with suppress(RuntimeError):  # one that is gone is found so by the next message
                expected = expected or self._messages.expect(rank)
                self._messages.receive(expected, rank, max(0.1, ends - time.monotonic()))

    def _lost(self, lost: dict[int, RuntimeError], doing: str) -> RankLostError:
        first = min(lost)
        ranks, is_one = ranks_named(lost), len(lost) == 1
        self.broken = f"{ranks} {'was' if is_one else 'were'} lost"
        return RankLostError(
            f"{ranks} {'is' if is_one else 'are'} gone, or did not {doing} within {self._timeout:g} s, so nothing was "
            f"published ({reason_of(lost[first])})",
            rank=first,
        )

    def _lost_lead(self, error: RuntimeError) -> RankLostError:
        self.broken = "rank 0 was lost"
        return RankLostError(
            f"rank 0 is gone, or gave up waiting for another rank, which its own error names ({reason_of(error)})",
            rank=0,
        )


def portable(error: BaseException) -> Exception:
    plain = PublishError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):
        return plain
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else plain  # noqa: S301 our own bytes
    except Exception:  # a foreign class may raise anything when it is pickled
        return plain


def portable_service_error(error: ServiceError) -> ServiceError:
    """A service error that can be sent, without its publication: each rank has its own object for that."""
    sent = portable(error)
    if not isinstance(sent, ServiceError):
        return ServiceError(str(error))
    sent = pickle.loads(pickle.dumps(sent))  # noqa: S301 our own bytes
    sent.publication = None
    return sent


class RankMessages:
    """Sends and receives over a group. `ranks` are the global numbers of its ranks."""

    def __init__(self, torch: Any, distributed: Any, group: Any, ranks: Sequence[int]) -> None:
        self._torch, self._distributed, self._group, self._ranks = torch, distributed, group, ranks

    def send(self, message: Any, to: int, timeout: float) -> None:
        """Send a message. Returns when the rank has received it: two that send to each other wait for ever. Raises
        RuntimeError: the rank is gone, or does not listen within the seconds.
        """
        body, *beside = parts_of(message)
        tensors = [self._torch.tensor([len(body), len(beside)], dtype=self._torch.int64), self._bytes(body)]
        if beside:
            tensors.append(self._torch.tensor([memoryview(part).nbytes for part in beside], dtype=self._torch.int64))
            tensors += map(self._bytes, beside)
        for tensor in tensors:
            work = self._distributed.isend(tensor, dst=self._ranks[to], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))

    def expect(self, source: int) -> tuple[Any, Any]:
        numbers = self._torch.zeros(2, dtype=self._torch.int64)
        return numbers, self._distributed.irecv(numbers, src=self._ranks[source], group=self._group)

    def receive(self, expected: tuple[Any, Any], source: int, timeout: float) -> Any:
        """The message of an `expect`. Raises RuntimeError: the rank is gone, or sends nothing within the seconds."""
        numbers, work = expected
        work.wait(timedelta(seconds=timeout))

        def arrived(count: int, kind: Any) -> Any:
            body = self._torch.empty(count, dtype=kind)
            work = self._distributed.irecv(body, src=self._ranks[source], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))
            return body.numpy()

        length, beside = cast("list[int]", numbers.tolist())
        parts = [arrived(length, self._torch.uint8).data]
        lengths: list[int] = arrived(beside, self._torch.int64).tolist() if beside else []
        return message_of(parts + [arrived(each, self._torch.uint8).data for each in lengths])

    def _bytes(self, part: Any) -> Any:
        return self._torch.frombuffer(part, dtype=self._torch.uint8)


def parts_of(message: Any) -> list[Any]:
    """The message, and after it the bytes of its large arrays, as buffers that can be written to."""
    beside: list[Any] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        beside.append(bytearray(raw) if raw.readonly else raw)  # torch warns of what cannot be written to
        return False

    return [bytearray(pickle.dumps(message, protocol=5, buffer_callback=stays)), *beside]


def message_of(parts: Sequence[Any]) -> Any:
    """The message of its parts, whose memory its arrays use."""
    message, *beside = parts
    return pickle.loads(message, buffers=beside)  # noqa: S301 from a rank of the same job, as torch's own collectives do


def succeeded(answers: Sequence[Any]) -> list[Any]:
    """The answers of all ranks. Raises the error of the first rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, FailedReply):
            told = argument_error_of_rank if answer.is_argument else error_of_rank
            raise told(rank, answer.error) from answer.error
    return list(answers)


def reason_of(error: RuntimeError) -> str:
    """What gloo says of a connection, without its line of source and its advice to gloo's developers."""
    first = (str(error).splitlines() or [""])[0]
    return _TORCH_ADVICE.sub("", _SOURCE.sub("", first)) or type(error).__name__


def error_of_rank(rank: int, error: Exception) -> PublishError:
    """The error that every rank raises for an error on one."""
    text = f"rank {rank}: {error}"
    match error:
        case InvalidWeightsError():
            return InvalidWeightsError(text, tensor=error.tensor)
        case NoSpaceError():
            return NoSpaceError(text, needed=error.needed, free=error.free)
        case RankLostError():
            return RankLostError(text, rank=error.rank)
        case OSError() if error.errno in NO_SPACE:
            return NoSpaceError(f"{text}: free some, or let the service keep fewer versions")
        case OSError() | StorageError():
            return StorageError(text)
        case PublishError():
            return PublishError(text)
        case _:
            return PublishError(f"rank {rank} failed with {type(error).__name__}: {error}")


def argument_error_of_rank(rank: int, error: Exception) -> Exception:
    """The error that every rank raises for arguments that cannot be on one: of the class that one rank would raise."""
    text = f"rank {rank}: {error}"
    match error:
        case TypeError():
            return TypeError(text)
        case ValueError():
            return ValueError(text)
        case _:
            return error_of_rank(rank, error)
