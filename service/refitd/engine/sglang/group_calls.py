"""The calls by which a stock SGLang receives a version over a process group. Each has a deadline.

    join    /init_weights_update_group, while the engine generates: its scheduler waits there for all members
    begin   /begin_weight_update, from 0.5.21 on; a session that a service left open is ended first
    load    /update_weights_from_distributed for each bucket, which is in flight while the sender broadcasts it
    end     /end_weight_update
    leave   /destroy_weights_update_group

A bucket that was received in part is answered with "Succeeded" (seen in 0.5.23), so no answer here proves anything.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from refitd.engine.http import NoReply, Reply, Transport
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.group.stock_words import BUCKETS_SECONDS, JOIN_SECONDS, StockWelcome
from refitd_client.transport.ipc.offer import OfferedTensor, StockTransfer

SESSIONS = (0, 5, 21)
OLDEST = (0, 5, 12)  # gives checksums
_CALL_SECONDS = 30.0


class StockGroup:
    """The calls to one engine about one transfer."""

    def __init__(self, http: Transport, group: str, *, sessions: bool, lacks: Callable[[str, Reply], None]) -> None:
        """Make none yet.

        Args:
            http: to the engine.
            group: the group's name.
            sessions: whether updates need a session.
            lacks: is called with a route that the engine does not have, and its answer.
        """
        self._http, self._group, self._sessions, self._lacks = http, group, sessions, lacks

    async def join(self, transfer: StockTransfer, welcome: StockWelcome, ranks: int) -> str | None:
        """Have all ranks join; why they have not, None where they have."""
        body = {
            "master_address": transfer.host,
            "master_port": welcome.port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": self._group,
            "backend": transfer.backend,
        }
        return await self._fault("/init_weights_update_group", body, JOIN_SECONDS)

    async def begin(self) -> str | None:
        """Begin a session; why it has not begun, None where it has or needs none."""
        if not self._sessions:
            return None
        fault = await self._fault("/begin_weight_update", {}, _CALL_SECONDS)
        if fault is None or "already open" not in fault:
            return fault
        return await self.end() or await self._fault("/begin_weight_update", {}, _CALL_SECONDS)

    async def load(self, buckets: Sequence[list[OfferedTensor]], label: str) -> str | None:
        """Ask for all buckets, in turn; why not all were loaded, None where the engine says that they were.

        Args:
            buckets: the tensors of each.
            label: the weight_version, which the last one sets.
        """
        for number, bucket in enumerate(buckets, 1):
            is_last = number == len(buckets)
            order = self._order(bucket) | ({"weight_version": label, "flush_cache": True} if is_last else {})
            if (fault := await self._fault("/update_weights_from_distributed", order, BUCKETS_SECONDS)) is not None:
                return f"bucket {number} of {len(buckets)}: {fault}"
        return None

    async def end(self) -> str | None:
        """End the session; why it has not ended, None where it has or there are none."""
        return await self._fault("/end_weight_update", {}, _CALL_SECONDS) if self._sessions else None

    async def leave(self) -> None:
        """Have all ranks leave the group. Where that fails, what is left is a group that is never used again."""
        await self._http.post("/destroy_weights_update_group", {"group_name": self._group}, _CALL_SECONDS)

    def _order(self, bucket: list[OfferedTensor]) -> dict[str, Any]:
        return {
            "names": [each.name for each in bucket],
            "dtypes": [TORCH_NAMES[each.dtype] for each in bucket],
            "shapes": [list(each.shape) for each in bucket],
            "group_name": self._group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }

    async def _fault(self, route: str, body: dict[str, Any], seconds: float) -> str | None:
        """Make a call; why it did not do what it was to do, None where it did."""
        reply = await self._http.post(route, body, seconds)
        if isinstance(reply, NoReply):
            return reply.reason
        if reply.ok and reply.data is not None and reply.data.get("success") is True:
            return None
        if reply.status == HTTPStatus.NOT_FOUND:
            self._lacks(route, reply)
        return f"the engine answered {reply.status}: {reply.short_message}"
