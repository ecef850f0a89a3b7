"""Calls to a vLLM server that end when its engine dies.

vLLM never answers calls that come while its engine dies, and its server waits for them for ever. /health answers on
another connection, without the engine: 503 with an empty body once the engine is dead. At most five seconds later the
server takes no connections any more.

A 503 with a body is a proxy's, and says nothing of the engine. Nor does a server that refuses one connection: a proxy
before it may be starting again.
"""

import asyncio
from typing import Any

from refitd.engine.http import MAX_BODY_BYTES, CallFailure, Key, NoReply, Reply, Transport

LOOK_EVERY_SECONDS = 1.0
HEALTH_SECONDS = 5.0
REFUSALS = 3  # of connections, one after the other, until the server counts as ended


class WatchedTransport(Transport):
    """A `Transport` that gives up a call that nothing will answer. While a long call is open, it looks each second."""

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, key: Key, within: float, most: int = MAX_BODY_BYTES
    ) -> Reply | NoReply:
        if within <= HEALTH_SECONDS:  # as a probe, which may ask a server of another kind
            return await super()._call(method, path, body, key, within, most)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(super()._call(method, path, body, key, within, most))
            end = tasks.create_task(self._end())
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            call.cancel()
            end.cancel()
        return end.result() if call.cancelled() else call.result()

    async def _end(self) -> NoReply:
        """Wait until the engine is dead or the server has ended."""
        refused = 0
        while refused < REFUSALS:
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            seen = await super()._call("GET", "/health", None, self._read, HEALTH_SECONDS)
            if isinstance(seen, Reply) and seen.status == 503 and not seen.text:
                return NoReply(CallFailure.DIED, "its engine has died: restart it")
            refused = refused + 1 if isinstance(seen, NoReply) and seen.nothing_listens else 0
        return NoReply(CallFailure.NO_ANSWER, f"{self.url} takes no connections any more, with a call open")
