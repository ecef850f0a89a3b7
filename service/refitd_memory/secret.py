"""The secret of a root, by which engines know that an offer of weights in memory comes from beside them."""

import asyncio

import structlog

from refitd.composition import Composition
from refitd_client.transport.offer_file import make_secret

log = structlog.get_logger("refitd")


async def compose(core: Composition) -> None:
    """Make the secret of the root. Without one no version is handed over from memory, and all else works."""
    try:
        await asyncio.to_thread(make_secret, core.root)
    except OSError as error:
        log.warning("no secret for hand-overs from memory", reason=str(error))
