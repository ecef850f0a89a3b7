"""A version in a trainer's memory, made ready on all ranks of an engine while it serves: each opens the offer's file,
finds that it was made under the root's secret, and holds names, shapes and dtypes against its model.

Unlike a version on disk it is not worth a try in the pause: whoever is not ready waits for the files.
"""

import asyncio
from typing import Any

from refitd.engine.plugin.channels import Channels
from refitd.engine.plugin.exchange import ChannelError
from refitd.engine.plugin.handshake import shown
from refitd.engine.plugin.prepared import Early, Preparation, Ready, Refused, Replies, forget
from refitd.engine.plugin.rank_group import EngineRankGroup
from refitd.engine.port import Offered

_MOST = 500  # characters of a rank's reason


def request_for(offered: Offered) -> dict[str, Any]:
    """As docs/plugin.md has it."""
    return {"do": "prepare", "path": offered.path, "offer": offered.offer}


async def prepare_offer(
    channels: Channels, rank_group: EngineRankGroup, offered: Offered, within: float, early: Early | None = None
) -> Preparation:
    """Have all ranks prepare, within seconds: `Ready` or `Refused`. What is not ready is forgotten. Who was asked
    `early` is not asked again.
    """
    request = request_for(offered)
    try:
        if early is None or not early.is_to(rank_group.members, request):
            early = Early(rank_group.members, request, await channels.ask_all(rank_group.members, request, within))
        done = judge_offer(early.replies, offered)
    except asyncio.CancelledError:
        await asyncio.shield(forget(channels, rank_group))
        raise
    if not isinstance(done, Ready):
        await forget(channels, rank_group)
    return done


def judge_offer(replies: Replies, offered: Offered) -> Preparation:
    """What the ranks' replies come to; the worst counts. Pure."""
    for reply in replies:
        if isinstance(reply, ChannelError):
            return Refused(f"a rank {reply}")
        if reply.get("ok") is not True:
            return Refused(f"it was not taken from memory: {shown(str(reply.get('reason', '')), _MOST)}")
        if reply.get("version") != offered.version:
            return Refused(f"the offer is of {shown(str(reply.get('version')))}, not of {offered.version}")
    if len({reply.get("digest") for reply in replies if isinstance(reply, dict)}) > 1:
        return Refused("the ranks do not see the same offer")
    return Ready()
