"""The parts of rings 1 and 2 in a service: copies of deltas for engines without the plugin, and the secret of the root.

By the secret engines know that an offer of weights in memory comes from beside them.
"""

import asyncio

import structlog

from refitd.composition import Composition
from refitd_client.transport.offer_file import make_secret
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.materializer import Materializer

log = structlog.get_logger("refitd")


async def compose(core: Composition) -> None:
    """Add both. Without a secret no version is handed over from memory, and all else works."""
    copies = Materializer(core.store, core.targets, core.books, DiskCopies(core.root, core.threads))
    core.fleet.check = copies.checking(core.fleet.check)
    core.collector.sweeper.copies = copies
    core.api.copies = copies
    core.runs.append(copies.run)
    try:
        await asyncio.to_thread(make_secret, core.root)
    except OSError as error:
        log.warning("no secret for hand-overs from memory", reason=str(error))
