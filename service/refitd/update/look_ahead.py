"""Has an engine look at a version before its verdict, and prove it where its GPUs can."""

import asyncio
from collections.abc import Callable, Sequence

from refitd.engine.port import Coming, EnginePort, RankProof
from refitd.state.version import VersionRecord
from refitd.update.entry import EngineEntry
from refitd.update.proving import RankProofs


async def look_ahead(
    entry: EngineEntry, engine: EnginePort, version: VersionRecord, proofs: RankProofs, waits: Callable[[], bool]
) -> None:
    """Have an engine prepare a version. It is not recorded: it changes nothing, and the load gives the answer.

    Args:
        entry: the engine's.
        engine: the engine.
        version: the version.
        proofs: hears what the engine's ranks prove.
        waits: whether there is still nothing else to do than to load that version; the request ends when there is.
    """
    proves = proofs.begin(version, entry.id)
    coming = Coming(
        version=version.id,
        path=version.path,
        allow_missing=version.may_lack,
        allow_extra=version.allow_extra,
        prove=proves,
    )
    found: Sequence[RankProof] = ()
    try:
        async with asyncio.TaskGroup() as group:
            request = group.create_task(engine.prefetch(coming))

            async def end_request() -> None:
                seen = entry.targets.changed.count
                while waits():
                    seen = await entry.targets.changed.wait_after(seen)
                request.cancel()

            guard = group.create_task(end_request())
            request.add_done_callback(lambda _: guard.cancel())
        found = () if request.cancelled() else request.result()
    finally:
        if proves:
            proofs.end(version.id, entry.id, found)
