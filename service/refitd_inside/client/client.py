"""The client of refitd's plugin in one engine, beside its HTTP API: find its ranks, prepare, forget, contents.

A version is prepared on all ranks of an engine while it serves, so that the pause is the copy alone.

files   The service has read every byte of a sealed version. A rank that sees the very same files (the same signature:
        names, sizes, times and inodes) does not read them again; one that sees others, as through a copy, does.
offer   A version in a trainer's memory. Each rank opens the offer's file, checks that it was made under the root's
        secret, and compares names, shapes and dtypes with its model. Where a rank is not ready, the engine waits for
        the files: unlike files, an offer is not tried in the pause.

Nothing here decides what an engine serves: that is the answer to the update itself. What a socket says can only make an
update shorter, or spare the engine one that it would refuse.

The service leads an engine by a lease, which it renews at each of the engine's ranks. A plugin that knows no leases is
not asked. A lease that is refused, because another service has it, is asked for again at each look: it ends with that
service.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from refitd.engine.kind import EngineAccess
from refitd.engine.plugin import EnginePlugin, Launch, Leads, Preparation, Prepared, PrepareRefused, Unprepared
from refitd.engine.port import Coming, Offered, RankProof, Target, VersionFiles
from refitd_client.contract.decoding import converted
from refitd_client.contract.plugin import TensorProof
from refitd_inside.client import MOST_REASON, EngineRankGroup, Member, Stock, shown
from refitd_inside.client.channels import ChannelError, Channels, SocketList

_WITHIN = 2.0  # seconds


class Leading:
    """One engine's lease. `led_by` names the other service that has it, in a sentence; None where none has."""

    def __init__(self, channels: Channels, leads: Leads) -> None:
        self.led_by: str | None = None
        self._channels = channels
        self._leads = leads
        self._told: tuple[Member, ...] = ()
        self._seconds = 0.0
        self._again_at = 0.0

    async def say(self, rank_group: EngineRankGroup | Stock) -> None:
        if not isinstance(rank_group, EngineRankGroup) or not all(
            member.handshake.leads for member in rank_group.members
        ):
            self.led_by, self._told = None, ()
            return
        now, seconds = time.monotonic(), self._leads.lasts()
        is_told = rank_group.members == self._told and self._seconds >= seconds
        if is_told and self.led_by is None and now < self._again_at:
            return
        request = {"do": "lead", "owner": msgspec.to_builtins(self._leads.owner), "seconds": seconds}
        replies = await self._channels.ask_all(rank_group.members, request, _WITHIN)
        refused = [each for each in replies if isinstance(each, dict) and each.get("ok") is not True]
        self.led_by = shown(str(refused[0].get("reason", "")), MOST_REASON) if refused else None
        self._told, self._seconds, self._again_at = rank_group.members, seconds, now + seconds / 3


AHEAD_SECONDS = 60.0  # to prepare a version that may turn out to be bad; the caller may give up before
OFFER_SECONDS = 10.0  # to look at a trainer's memory: nothing of it is read yet
SENT_SECONDS = 120.0  # to receive what a trainer sends over a process group
CONTENTS_SECONDS = 120.0  # to fingerprint all tensors, while the engine serves
FORGET_SECONDS = 2.0
_BUSY_SECONDS = 0.2  # between two tries while a rank still works on a version that was cancelled

Replies = list[dict[str, Any] | ChannelError]


def files_request(version: VersionFiles | Coming, *, cast: bool, check: str = "headers") -> dict[str, Any]:
    """The request for a version on disk (docs/plugin.md). `cast`: whether the engine may cast tensors to its own dtype.
    `check`: `headers`, or `bytes` to have all of it read once more.
    """
    return {
        "do": "prepare",
        "path": version.path,
        "check": check,
        "allow_missing": version.allow_missing,
        "allow_extra": version.allow_extra,
        "allow_dtype_cast": cast,
    }


def offer_request(offered: Offered) -> dict[str, Any]:
    return {"do": "prepare", "path": offered.path, "offer": offered.offer}


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What the ranks answered to a request that was sent before the version was known to be good."""

    members: Sequence[Member]
    request: dict[str, Any]
    replies: Replies

    def is_to(self, members: Sequence[Member], request: dict[str, Any]) -> bool:
        return (self.members, self.request) == (members, request)

    @property
    def proofs(self) -> tuple[RankProof, ...]:
        """What the ranks prove; a rank that did not answer, or in another form, proves nothing."""
        return tuple(_proof(one, reply) for one, reply in zip(self.members, self.replies, strict=True))


def _proof(member: Member, reply: dict[str, Any] | ChannelError) -> RankProof:
    rank, ranks = member.handshake.rank, member.handshake.ranks
    said = reply if isinstance(reply, dict) else {"reason": str(reply)}
    try:
        proof = converted(said.get("proof"), TensorProof)
    except msgspec.ValidationError:
        reason = said.get("reason") or "it does not say what it found"
        proof = TensorProof(fault=shown(str(reason), MOST_REASON))
    return RankProof(
        rank=rank,
        ranks=ranks,
        signature=str(said.get("signature", "")),
        tensors=proof.tensors,
        digest=proof.digest,
        fault=shown(proof.fault, MOST_REASON),
    )


def judge(replies: Replies, files: VersionFiles) -> Preparation:
    said = [reply for reply in replies if isinstance(reply, dict)]
    if refused := [reply for reply in said if reply.get("ok") is not True]:
        reason = f"the engine refused, and serves on: {shown(str(refused[0].get('reason', '')), MOST_REASON)}"
        return PrepareRefused(reason, needs_full=all(reply.get("needs") == "full" for reply in refused))
    if any(reply.get("digest") != files.digest for reply in said):
        return PrepareRefused(
            f"the engine sees another version at {files.path}: is its root the folder that refitd has?"
        )
    if len(said) < len(replies):
        fault = next(reply for reply in replies if isinstance(reply, ChannelError))
        return Unprepared(f"a rank {fault}")
    return Prepared()


def _has_seen(reply: dict[str, Any] | ChannelError, files: VersionFiles) -> bool:
    return isinstance(reply, dict) and reply.get("signature") == files.signature


def judge_offer(replies: Replies, offered: Offered) -> Preparation:
    """What the ranks' replies come to; the worst counts. Pure."""
    for reply in replies:
        if isinstance(reply, ChannelError):
            return PrepareRefused(f"a rank {reply}")
        if reply.get("ok") is not True:
            return PrepareRefused(f"it was not taken from memory: {shown(str(reply.get('reason', '')), MOST_REASON)}")
        if reply.get("version") != offered.version:
            return PrepareRefused(f"the offer is of {shown(str(reply.get('version')))}, not of {offered.version}")
    if len({reply.get("digest") for reply in replies if isinstance(reply, dict)}) > 1:
        return PrepareRefused("the ranks do not see the same offer")
    return Prepared()


class PluginClient(EnginePlugin):
    """Requests to the plugin. `root` is the folder that its sockets are in; without one every engine is stock."""

    def __init__(
        self,
        root: Path | None,
        *,
        allow_dtype_cast: bool,
        leads: Leads | None = None,
        sockets: SocketList | None = None,
    ) -> None:
        self._channels = Channels(root, sockets)
        self._leading = None if leads is None else Leading(self._channels, leads)
        self._cast = allow_dtype_cast
        self._rank_group: EngineRankGroup | Stock = Stock("")
        self.seen = self._rank_group.seen
        self._waiting = False  # whether its ranks may hold a version that was prepared and not loaded
        self._early: Prefetched | None = None

    async def look(self, launch: Launch, *, anew: bool = False) -> None:
        """Find the ranks of the engine that was started so. `anew`: whatever was found just now."""
        if anew:
            self._channels.doubt()
        self._rank_group = await self._channels.rank_group(launch)
        if self._leading is not None:
            await self._leading.say(self._rank_group)
        self.seen = replace(self._rank_group.seen, led_by=None if self._leading is None else self._leading.led_by)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """Have a version prepared before the service has checked it. Gives up after some time. Returns what the ranks
        prove of it, where that is wanted and they can.
        """
        if not (members := self._rank_group.members):
            return ()
        is_offer = isinstance(version, Offered)
        within = _seconds_of(version) if is_offer else AHEAD_SECONDS
        request = offer_request(version) if is_offer else files_request(version, cast=self._cast)
        proves = not is_offer and version.prove and self.seen.proves
        self._early, self._waiting = None, True
        asked = request | {"prove": True} if proves else request
        self._early = Prefetched(members, request, await self._channels.ask_all(members, asked, within))
        return self._early.proofs if proves else ()

    async def prepare_for(self, target: Target, within: float) -> Preparation:
        """Have what an engine is to serve prepared while it serves: a version's files, or an offer. `within`: seconds
        to prepare files; an offer is only looked at.
        """
        if target.offered is not None:
            return await self.take(target.offered, _seconds_of(target.offered))
        if target.files is not None:
            return await self.prepare(target.files, within)
        return Unprepared("nothing is known of its files")

    async def prepare(self, files: VersionFiles, within: float) -> Preparation:
        early, self._early = self._early, None
        members, request = self._rank_group.members, files_request(files, cast=self._cast)
        if not members:
            return Unprepared("no plugin answers for it")
        known = early.replies if early is not None and early.is_to(members, request) else []
        if known and isinstance(judge(known, files), Prepared) and all(_has_seen(reply, files) for reply in known):
            return await self._ended(Prepared())  # those that prepared these very files are not asked again
        try:
            async with asyncio.timeout(within):
                replies = await self._replies(members, request, within)
                done = judge(replies, files)
                others = [one for one, reply in zip(members, replies, strict=True) if not _has_seen(reply, files)]
                if isinstance(done, Prepared) and others:
                    request = files_request(files, cast=self._cast, check="bytes")
                    done = judge(await self._replies(others, request, within), files)
        except TimeoutError:
            done = Unprepared(f"its ranks were not ready within {within:g} s")
        except asyncio.CancelledError:
            await asyncio.shield(self._have_forgotten())
            raise
        if isinstance(done, Unprepared):
            self._channels.doubt()
        return await self._ended(done)

    async def take(self, offered: Offered, within: float) -> Preparation:
        """Have an offer prepared while the engine serves: `Prepared` or `PrepareRefused`, within seconds."""
        early, self._early = self._early, None
        members, request = self._rank_group.members, offer_request(offered)
        if not members:
            return PrepareRefused("no plugin answers for it")
        try:
            if early is None or not early.is_to(members, request):
                early = Prefetched(members, request, await self._channels.ask_all(members, request, within))
        except asyncio.CancelledError:
            await asyncio.shield(self._have_forgotten())
            raise
        return await self._ended(judge_offer(early.replies, offered))

    async def _ended(self, done: Preparation) -> Preparation:
        """Note what the ranks hold. Where it is not a whole version, they forget it."""
        self._waiting = isinstance(done, Prepared)
        if not self._waiting:
            await self._have_forgotten()
        return done

    async def _replies(self, members: Sequence[Member], request: dict[str, Any], within: float) -> Replies:
        """Ask all, and ask again those that are still busy with a version that was cancelled."""
        replies = dict(zip(members, await self._channels.ask_all(members, request, within), strict=True))
        while busy := [member for member, reply in replies.items() if isinstance(reply, dict) and reply.get("busy")]:
            await asyncio.sleep(_BUSY_SECONDS)
            replies |= zip(busy, await self._channels.ask_all(busy, request, within), strict=True)
        return list(replies.values())

    async def _have_forgotten(self) -> None:
        """Have all ranks close what they prepared. One that this does not reach closes it at the next update."""
        await self._channels.ask_all(self._rank_group.members, {"do": "forget"}, FORGET_SECONDS)

    def is_done(self) -> None:
        self._waiting, self._early = False, None

    def was_loaded(self, how: str) -> None:
        """Note that a load succeeded. Ranks that may have learned a load plan are asked again at the next look."""
        if how == "load" or self.seen.loader is not None:
            self._channels.doubt()

    async def forget(self) -> None:
        self._early = None
        if self._waiting and self._rank_group.members:
            self._waiting = False
            await self._have_forgotten()

    async def contents(self, *, of_all: bool = False) -> list[str]:
        """The digests of what the ranks hold that answer an update; an empty one where a rank does not say.

        `of_all`: all ranks of this engine answer, not the first of each data-parallel one.
        """
        ranks = self._rank_group.members if of_all else self._rank_group.first
        replies = await self._channels.ask_all(ranks, {"do": "contents"}, CONTENTS_SECONDS)
        return [str(reply.get("contents", "")) if isinstance(reply, dict) else "" for reply in replies]


def _seconds_of(offered: Offered) -> float:
    return SENT_SECONDS if offered.sent else OFFER_SECONDS


def plugins_under(access: EngineAccess, leads: Leads | None) -> Callable[[], EnginePlugin]:
    """Return what makes the client of one server. The sockets beneath the root are listed once for all servers."""
    sockets = None if access.root is None else SocketList(access.root)
    return lambda: PluginClient(access.root, allow_dtype_cast=access.allow_dtype_cast, leads=leads, sockets=sockets)
