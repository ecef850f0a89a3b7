"""The loads of one process of a vLLM server: whether one may still run, and what one that failed has left behind.

What a load that failed has read goes into the next one, which fails of it or answers 200 all the same. So after a
failure a checkpoint counts as loaded only by a load that began after one that went well.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS
from refitd.engine.load_reply import Loaded, Unclear, Untouched
from refitd.engine.port import never_change
from refitd.engine.vllm.reply import CONTROL, Failed, Loading, not_aligned, what_happened

TRIES = 4  # loads of one checkpoint after one that failed: most engines that come back have done so at the second


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBefore:
    """What the engine serves, as far as it is known: `fingerprint` is None until it was computed.

    `unchanged` says whether the files at `path` are still those that were checked.
    """

    path: str
    label: str
    fingerprint: str | None = None
    unchanged: Callable[[], Awaitable[bool]] = field(default=never_change, compare=False)


class ProcessLoads:
    """Sends loads, one at a time.

    Attributes:
        lost: why nothing counts any more that this process of the server answers; None while it does.
    """

    def __init__(self, http: Transport, within: float) -> None:
        """Make no call yet. `within`: seconds that a load may take."""
        self.lost: str | None = None
        self._http = http
        self._within = within
        self._running = False  # whether a load was sent whose end is not known
        self._torn = False  # whether the last load failed: what it has read is still there

    async def settle(self) -> str | None:
        """Wait until a load whose end is not known has ended; why it may still run, None where none does.

        /weight_info goes through the process that loads.
        """
        if not self._running:
            return None
        reply = await self._http.get("/weight_info", self._within)
        if isinstance(reply, NoReply):
            return reply.reason if reply.lost is CallFailure.DIED else f"a load may still be running: {reply.reason}"
        self._running = False
        return None

    async def aligned(self, ranks: int) -> NoReply | str | None:
        """Why the answers of several processes cannot be told apart; None where they can."""
        reply = await self._http.post("/collective_rpc", {"method": CONTROL}, CALL_SECONDS)
        if isinstance(reply, NoReply):
            return reply
        self.lost = not_aligned(reply, ranks)
        return self.lost

    async def load(self, path: str, ranks: int, *, torn: bool = False) -> Loading:
        """Load a checkpoint, again where something of an earlier one may be left: see the module.

        Args:
            path: as the server sees it.
            ranks: the processes that hold weights.
            torn: it is not known whether the load before has failed.
        """
        self._torn = self._torn or torn
        for _ in range(TRIES - 1):
            began_torn = self._torn
            happened = await self._once(path, ranks)
            if not isinstance(happened, Loaded | Failed) or not began_torn:
                return happened
        began_torn = self._torn
        happened = await self._once(path, ranks)
        return Failed("it loads only now and then") if began_torn and isinstance(happened, Loaded) else happened

    async def by_extension(self, path: str) -> Reply | NoReply:
        """Have refitd's extension load a version; the extension itself sees to what was left behind."""
        self._running = True
        reply = await self._call("refitd_update", path=path)
        self._running = isinstance(reply, NoReply) and reply.lost is not CallFailure.DIED
        return reply

    async def _once(self, path: str, ranks: int) -> Loading:
        self._running = True
        happened = what_happened(await self._call("reload_weights", weights_path=path), ranks)
        self._running = isinstance(happened, Unclear) and happened.running
        if not isinstance(happened, Untouched):
            self._torn = not isinstance(happened, Loaded)
        if ranks > 1 and isinstance(happened, Failed | Unclear):
            self.lost = f"{happened.reason}; its processes answer other calls than they are asked since: restart it"
        return happened

    async def _call(self, method: str, **arguments: Any) -> Reply | NoReply:
        """Call a method of each worker, without vLLM's own `timeout`: one that expires kills the engine."""
        return await self._http.post("/collective_rpc", {"method": method, "kwargs": arguments}, self._within)
