"""Preparing a version on all ranks of an engine while it serves, so that the pause is the copy alone.

files   The service has read every byte of a sealed version. A rank that sees the very same files (the same signature:
        names, sizes, times and inodes) does not read them again; one that sees others, as through a copy, does.
offer   A version in a trainer's memory. Each rank opens the offer's file, checks that it was made under the root's
        secret, and compares names, shapes and dtypes with its model. Where a rank is not ready, the engine waits for
        the files: unlike files, an offer is not tried in the pause.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from refitd.engine.plugin.channels import Channels
from refitd.engine.plugin.exchange import ChannelError
from refitd.engine.plugin.rank_group import MOST_REASON, EngineRankGroup, Member, shown
from refitd.engine.port import Coming, Offered, RankProof, VersionFiles
from refitd_client.contract.decoding import converted
from refitd_client.contract.plugin import TensorProof

FORGET_SECONDS = 2.0
_BUSY_SECONDS = 0.2  # between two tries while a rank still works on a version that was cancelled

Replies = list[dict[str, Any] | ChannelError]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Every rank holds the version open, checked."""


@dataclass(frozen=True, slots=True)
class PrepareRefused:
    """A rank would not load it. Nothing was paused and nothing is left open. `needs_full` as in `Refit`."""

    reason: str
    needs_full: bool = False


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A rank did not answer: the update checks the version in the pause, as it does without a socket."""

    reason: str


Preparation = Prepared | PrepareRefused | Unprepared


def files_request(version: VersionFiles | Coming, *, cast: bool, check: str = "headers") -> dict[str, Any]:
    """The request for a version on disk (docs/plugin.md).

    Args:
        version: the version.
        cast: whether the engine may cast tensors to its own dtype.
        check: `headers`, or `bytes` to have all of it read once more.
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
    """The request for a version in a trainer's memory (docs/plugin.md)."""
    return {"do": "prepare", "path": offered.path, "offer": offered.offer}


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What the ranks answered to a request that was sent before the version was known to be good."""

    members: Sequence[Member]
    request: dict[str, Any]
    replies: Replies

    def is_to(self, members: Sequence[Member], request: dict[str, Any]) -> bool:
        """Whether these ranks were sent this request."""
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


async def prepare(
    channels: Channels,
    rank_group: EngineRankGroup,
    files: VersionFiles,
    within: float,
    *,
    cast: bool = False,
    early: Prefetched | None = None,
) -> Preparation:
    """Have all ranks prepare. Where that does not end in `Prepared`, or is cancelled, they are told to forget it.

    Args:
        channels: the ranks' sockets.
        rank_group: the ranks.
        files: the version, as the service has checked it.
        within: seconds after which it gives up.
        cast: whether the engine may cast tensors to its own dtype.
        early: what the ranks answered before; those that prepared these very files are not asked again.
    """
    request = files_request(files, cast=cast)
    known = early.replies if early is not None and early.is_to(rank_group.members, request) else []
    if known and isinstance(judge(known, files), Prepared) and all(_has_seen(reply, files) for reply in known):
        return Prepared()
    try:
        async with asyncio.timeout(within):
            replies = await _replies(channels, rank_group.members, request, within)
            done = judge(replies, files)
            others = [
                one for one, reply in zip(rank_group.members, replies, strict=True) if not _has_seen(reply, files)
            ]
            if isinstance(done, Prepared) and others:
                request = files_request(files, cast=cast, check="bytes")
                done = judge(await _replies(channels, others, request, within), files)
    except TimeoutError:
        done = Unprepared(f"its ranks were not ready within {within:g} s")
    except asyncio.CancelledError:
        await asyncio.shield(forget(channels, rank_group))
        raise
    if isinstance(done, Unprepared):
        channels.doubt()
    if not isinstance(done, Prepared):
        await forget(channels, rank_group)
    return done


async def forget(channels: Channels, rank_group: EngineRankGroup) -> None:
    """Have all ranks close what they prepared. One that this does not reach closes it at the next update."""
    await channels.ask_all(rank_group.members, {"do": "forget"}, FORGET_SECONDS)


async def _replies(channels: Channels, members: Sequence[Member], request: dict[str, Any], within: float) -> Replies:
    """Ask all, and ask again those that are still busy with a version that was cancelled."""
    replies = dict(zip(members, await channels.ask_all(members, request, within), strict=True))
    while busy := [member for member, reply in replies.items() if isinstance(reply, dict) and reply.get("busy")]:
        await asyncio.sleep(_BUSY_SECONDS)
        replies |= zip(busy, await channels.ask_all(busy, request, within), strict=True)
    return list(replies.values())


def judge(replies: Replies, files: VersionFiles) -> Preparation:
    """What the ranks' replies come to; the worst counts."""
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
    """Whether a rank has prepared these very files."""
    return isinstance(reply, dict) and reply.get("signature") == files.signature


async def prepare_offer(
    channels: Channels, rank_group: EngineRankGroup, offered: Offered, within: float, early: Prefetched | None = None
) -> Preparation:
    """Have all ranks prepare an offer: `Prepared` or `PrepareRefused`. If it is refused, they are told to forget it.

    Args:
        channels: the ranks' sockets.
        rank_group: the ranks.
        offered: the version.
        within: seconds after which it gives up.
        early: what the ranks answered before; then they are not asked again.
    """
    request = offer_request(offered)
    try:
        if early is None or not early.is_to(rank_group.members, request):
            early = Prefetched(rank_group.members, request, await channels.ask_all(rank_group.members, request, within))
        done = judge_offer(early.replies, offered)
    except asyncio.CancelledError:
        await asyncio.shield(forget(channels, rank_group))
        raise
    if not isinstance(done, Prepared):
        await forget(channels, rank_group)
    return done


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
