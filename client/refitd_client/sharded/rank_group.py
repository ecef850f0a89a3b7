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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from refitd_client.contract.manifest import ManifestFile
from refitd_client.delta.plan import DeltaRules
from refitd_client.errors import PublishError, RankLostError, ServiceError
from refitd_client.publish.durability import ALWAYS
from refitd_client.publish.options import is_timeout
from refitd_client.publish.publication import Publication
from refitd_client.sharded.layout import Claim, Location, WritePart
from refitd_client.sharded.lend_orders import LendOrder, LentReply
from refitd_client.sharded.messages import RankMessages
from refitd_client.sharded.rank_errors import ranks_named, reason_of
from refitd_client.sharded.shadow_orders import ChangesReply, ShadowOrder
from refitd_client.sharded.slot_orders import BlocksReply, SlotOrder
from refitd_client.transport.group.child import TransferSent
from refitd_client.transport.ipc.offer import GroupTransfer
from refitd_client.transport.shards.needs import PartialNeeds
from refitd_client.transport.shards.script import ShardTable
from refitd_client.transport.ways import TrainerPlace, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A rank has called `publish`. `claims` are None where they are those of layout number `layout`.

    `transport` is what it asks for; `place` says where its tensors are, where it asks for any. `durable` is its word on
    which versions get files, `delta_rules` on deltas. `shadow` is the number of the shadow that it has. `is_on_gpu`:
    all its tensors are on one GPU.
    """

    step: int
    layout: int
    claims: list[Claim] | None
    samples: dict[str, int]
    transport: Transport | None = None
    place: TrainerPlace | None = None
    durable: str = ALWAYS
    delta_rules: DeltaRules = field(default_factory=DeltaRules)
    shadow: int = 0
    is_on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A layout as one rank needs it."""

    number: int
    files: list[str]
    locations: dict[str, Location]
    parts: list[WritePart]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """Write your parts into this staging folder of the run. `task` is None where it is that of the last time."""

    staging: str
    task: RankTask | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestOrder:
    """All is written and synced: digest these files, with their tensors' `fingerprints` where they are wanted."""

    names: list[str]
    fingerprints: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """Copy what you write into memory of its own, and scan it. `task` as for `WriteOrder`.

    `partial` are the strips of tensors that engine ranks need in part, by the digest of their needs and by name; None
    where they are known from before.
    """

    task: RankTask | None
    partial: dict[str, PartialNeeds | None] = field(default_factory=dict[str, "PartialNeeds | None"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Begin to send what you have staged. `table` is what rank 0's sender plans from, None for the others."""

    transfer: GroupTransfer
    table: ShardTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOrder:
    """Wait for receivers no longer, and say what has come of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedReply:
    """All is staged, or copied into a slot.

    `scans` are what this rank's parts add to each tensor's fingerprint, and how many of their elements are not finite,
    by name. `slices` are what they add where a tensor is needed in part, by digest and name.
    """

    scans: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    slices: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])


@dataclass(frozen=True, slots=True, kw_only=True)
class SentReply:
    """What has come of a transfer on one rank: what was sent, or why nothing was."""

    sent: TransferSent | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneReply:
    """An order was carried out. `files` are what it digested, `fingerprints` those of the tensors in them."""

    files: dict[str, ManifestFile] = field(default_factory=dict[str, ManifestFile])
    fingerprints: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedReply:
    """An order was not carried out, or a rank could not begin. `is_argument`: its arguments cannot be."""

    error: Exception
    is_argument: bool = False


RankOrder = WriteOrder | SlotOrder | DigestOrder | StageOrder | SendOrder | EndOrder | LendOrder | ShadowOrder
RankReply = DoneReply | BlocksReply | StagedReply | SentReply | LentReply | ChangesReply | FailedReply


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedOutcome:
    """The version is committed, or engines have it in memory alone. `publication` is rank 0's, without its connection;
    `error` is what the service refused the notice with. `shadow` is the number of the shadow that stands, 0 for none.
    """

    publication: Publication
    error: ServiceError | None
    shadow: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedOutcome:
    """Nothing was published. `broken` says why the publisher cannot be used again, None if it can."""

    error: Exception
    broken: str | None


_LEAD_PATIENCE = 4.0  # times the timeout that others wait for rank 0, which may itself be waiting for a rank


_USUAL_TIMEOUT = 300.0


class RankGroup:
    """This rank's connections. `rank` and `size` are those in the group; `broken` says why it cannot be used again."""

    def __init__(self, process_group: Any, timeout: float) -> None:
        """Join. Without a group it is all ranks, which make a group of their own for this: a collective call.

        A `timeout` that is none is taken for the usual one: the ranks need the group to hear of it.

        Raises:
            PublishError: torch.distributed is not initialised, a rank does not come, or the group cannot carry CPU
                tensors.
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
        """Check that the group can be used.

        Raises:
            PublishError: a rank was lost before, or the publisher is closed.
        """
        if self._group is None:
            raise PublishError("this publisher is closed: open another")
        if self.broken is not None:
            raise PublishError(f"this publisher cannot be used any more ({self.broken}): open another on every rank")

    def tell(self, message: Any, longer: float = 0.0) -> None:
        """Send rank 0 an answer. `longer` as for `hear`.

        Raises:
            RankLostError: rank 0 is gone, or does not listen in time.
        """
        try:
            self._messages.send(message, 0, self._timeout * _LEAD_PATIENCE + longer)
        except RuntimeError as error:
            raise self._lost_lead(error) from error

    def hear(self, longer: float = 0.0) -> Any:
        """Receive the next message from rank 0. `longer` are seconds that rank 0 may wait for others than ranks.

        Raises:
            RankLostError: rank 0 is gone, or sends nothing in time.
        """
        try:
            return self._messages.receive(self._messages.expect(0), 0, self._timeout * _LEAD_PATIENCE + longer)
        except RuntimeError as error:
            raise self._lost_lead(error) from error

    def hear_all(self, own: Any, doing: str) -> list[Any]:
        """Receive the answers of all ranks, with `own` as rank 0's. Only rank 0 calls it.

        Raises:
            RankLostError: a rank is gone or late with `doing`. The other answers were received, so those ranks are in
                step.
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
        listen.

        Raises:
            RankLostError: a rank is gone, or does not listen.
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
    """An error that can be sent to another process."""
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
