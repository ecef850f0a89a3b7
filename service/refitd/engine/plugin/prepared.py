"""A version made ready on all ranks of an engine while it serves, so that its pause is the copy alone.

The service has read every byte of what it sealed. Where a rank sees the very same files (the same signature: names,
sizes, times and inodes) it need not read them again; where it sees them in another way, as through a copy, it does.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refitd.engine.plugin.channels import Channels
from refitd.engine.plugin.exchange import ChannelError
from refitd.engine.plugin.handshake import shown
from refitd.engine.plugin.rank_group import EngineRankGroup, Member
from refitd.engine.port import Coming, Files

FORGET_SECONDS = 2.0
_BUSY_SECONDS = 0.2  # between two tries while a rank is still at a version that nobody wants any more
_MOST = 500  # characters of a rank's reason

Replies = list[dict[str, Any] | ChannelError]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every rank holds the version open, checked."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank would not load it. Nothing was paused, nothing is held open any more. `needs_full` as in `Refit`."""

    reason: str
    needs_full: bool = False


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A rank was not heard of: the update checks the version in the pause, as it does without a channel."""

    reason: str


Preparation = Ready | Refused | Unprepared


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks are told: the version, and whether the operator lets engines cast tensors to their own dtype."""

    version: Files | Coming
    allow_dtype_cast: bool = False

    def request(self, check: str) -> dict[str, Any]:
        """As docs/plugin.md has it. `check`: `headers`, or `bytes` to read all of it once more."""
        allowed = {"allow_missing": self.version.allow_missing, "allow_extra": self.version.allow_extra}
        cast = {"allow_dtype_cast": self.allow_dtype_cast}
        return {"do": "prepare", "path": self.version.path, "check": check, **allowed, **cast}


@dataclass(frozen=True, slots=True)
class Early:
    """What the ranks have answered to an order that was given before there was to be a load."""

    members: Sequence[Member]
    request: dict[str, Any]
    replies: Replies

    def is_to(self, members: Sequence[Member], request: dict[str, Any]) -> bool:
        """Whether the same ranks were asked for the same."""
        return (self.members, self.request) == (members, request)

    def makes_ready(self, members: Sequence[Member], request: dict[str, Any], files: Files) -> bool:
        """Whether they have made ready what was found good since: these very files."""
        if not self.is_to(members, request):
            return False
        return isinstance(judge(self.replies, files), Ready) and all(_has_seen(each, files) for each in self.replies)


async def prepare_early(
    channels: Channels, rank_group: EngineRankGroup, request: dict[str, Any], within: float
) -> Early:
    """Have all ranks look at a version already. Raises nothing for what they say."""
    return Early(rank_group.members, request, await channels.ask_all(rank_group.members, request, within))


async def prepare(
    channels: Channels,
    rank_group: EngineRankGroup,
    files: Files,
    within: float,
    *,
    cast: bool = False,
    early: Early | None = None,
) -> Preparation:
    """Have all ranks prepare, within seconds. What does not end in `Ready` is forgotten, also when it is cancelled.

    `cast` is as `Order` has it. Who has made it ready `early` is not asked again.
    """
    order = Order(files, cast)
    if early is not None and early.makes_ready(rank_group.members, order.request("headers"), files):
        return Ready()
    try:
        async with asyncio.timeout(within):
            done = await _prepared(channels, rank_group.members, order, files, within)
    except TimeoutError:
        done = Unprepared(f"its ranks were not ready within {within:g} s")
    except asyncio.CancelledError:
        await asyncio.shield(forget(channels, rank_group))
        raise
    if isinstance(done, Unprepared):
        channels.doubt()
    if not isinstance(done, Ready):
        await forget(channels, rank_group)
    return done


async def forget(channels: Channels, rank_group: EngineRankGroup) -> None:
    """Have all ranks close what they prepared. One that does not hear of it closes it at the next update."""
    await channels.ask_all(rank_group.members, {"do": "forget"}, FORGET_SECONDS)


async def _prepared(
    channels: Channels, members: Sequence[Member], order: Order, files: Files, within: float
) -> Preparation:
    replies = await _replies(channels, members, order.request("headers"), within)
    found = judge(replies, files)
    others = [member for member, reply in zip(members, replies, strict=True) if not _has_seen(reply, files)]
    if isinstance(found, Ready) and others:
        return judge(await _replies(channels, others, order.request("bytes"), within), files)
    return found


async def _replies(channels: Channels, members: Sequence[Member], request: dict[str, Any], within: float) -> Replies:
    """Ask, and ask again those that are still busy with what was given up."""
    replies = dict(zip(members, await channels.ask_all(members, request, within), strict=True))
    while busy := [member for member, reply in replies.items() if isinstance(reply, dict) and reply.get("busy")]:
        await asyncio.sleep(_BUSY_SECONDS)
        replies |= zip(busy, await channels.ask_all(busy, request, within), strict=True)
    return list(replies.values())


def judge(replies: Replies, files: Files) -> Preparation:
    """What the ranks' replies come to; the worst counts."""
    said = [reply for reply in replies if isinstance(reply, dict)]
    if refused := [reply for reply in said if reply.get("ok") is not True]:
        reason = f"the engine refused, and serves on: {shown(str(refused[0].get('reason', '')), _MOST)}"
        return Refused(reason, needs_full=all(reply.get("needs") == "full" for reply in refused))
    if any(reply.get("digest") != files.digest for reply in said):
        return Refused(f"the engine sees another version at {files.path}: is its root the folder that refitd has?")
    if len(said) < len(replies):
        fault = next(reply for reply in replies if isinstance(reply, ChannelError))
        return Unprepared(f"a rank {fault}")
    return Ready()


def _has_seen(reply: dict[str, Any] | ChannelError, files: Files) -> bool:
    return isinstance(reply, dict) and reply.get("signature") == files.signature
