"""The client of refitd's plugin in one engine, beside its HTTP API: find its ranks, prepare, forget, contents."""

from collections.abc import Sequence
from pathlib import Path

from refitd.engine.plugin.channels import Channels, SocketList
from refitd.engine.plugin.leading import Leading, Leads
from refitd.engine.plugin.prepared import (
    Prefetched,
    Preparation,
    Prepared,
    PrepareRefused,
    Unprepared,
    files_request,
    forget,
    offer_request,
    prepare,
    prepare_offer,
)
from refitd.engine.plugin.rank_group import EngineRankGroup, Launch, Stock
from refitd.engine.port import Coming, LoaderUse, Offered, RankProof, Target, VersionFiles
from refitd_client.contract.receivers import Receiver

AHEAD_SECONDS = 60.0  # to prepare a version that may turn out to be bad; the caller may give up before
OFFER_SECONDS = 10.0  # to look at a trainer's memory: nothing of it is read yet
SENT_SECONDS = 120.0  # to receive what a trainer sends over a process group
CONTENTS_SECONDS = 120.0  # to fingerprint all tensors, while the engine serves


class PluginClient:
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
        self._rank_group: EngineRankGroup | Stock | None = None
        self._waiting = False  # whether its ranks may hold a version that was prepared and not loaded
        self._early: Prefetched | None = None

    @property
    def release(self) -> str | None:
        """The plugin's release; None where SGLang itself loads."""
        return self._rank_group.release if isinstance(self._rank_group, EngineRankGroup) else None

    @property
    def takes_offers(self) -> bool:
        """Whether the engine can load from the memory of a trainer on its host."""
        return isinstance(self._rank_group, EngineRankGroup) and self._rank_group.takes_offers

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """Its ranks that can receive weights over a process group, without the engine's id."""
        return self._rank_group.receivers if isinstance(self._rank_group, EngineRankGroup) else ()

    @property
    def reason(self) -> str | None:
        """Why SGLang itself loads."""
        return self._rank_group.reason if isinstance(self._rank_group, Stock) else None

    @property
    def led_by(self) -> str | None:
        """Which other service leads the engine, as a sentence."""
        return None if self._leading is None else self._leading.led_by

    @property
    def loader(self) -> LoaderUse | None:
        """What the plugin does not copy by itself, as of the last handshakes."""
        return self._rank_group.loader if isinstance(self._rank_group, EngineRankGroup) else None

    def vouches_for(self, target: Target) -> bool:
        """Whether the answer to a load will say what the engine holds after it."""
        return (target.files is not None or target.offered is not None) and self.release is not None

    async def look(self, launch: Launch, *, anew: bool = False) -> None:
        """Find the ranks of the engine that was started so. `anew`: whatever was found just now."""
        if anew:
            self._channels.doubt()
        self._rank_group = await self._channels.rank_group(launch)
        if self._leading is not None:
            await self._leading.say(self._rank_group)

    @property
    def proves(self) -> bool:
        """Whether its ranks can prove versions with their GPUs."""
        return isinstance(self._rank_group, EngineRankGroup) and self._rank_group.proves

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """Have a version prepared before the service has checked it. Gives up after some time. Returns what the ranks
        prove of it, where that is wanted and they can.
        """
        if not isinstance(self._rank_group, EngineRankGroup):
            return ()
        is_offer = isinstance(version, Offered)
        within = _seconds_of(version) if is_offer else AHEAD_SECONDS
        request = offer_request(version) if is_offer else files_request(version, cast=self._cast)
        proves = not is_offer and version.prove and self._rank_group.proves
        self._early, self._waiting = None, True
        members = self._rank_group.members
        asked = request | {"prove": True} if proves else request
        self._early = Prefetched(members, request, await self._channels.ask_all(members, asked, within))
        return self._early.proofs if proves else ()

    async def prepare_for(self, target: Target, within: float) -> Preparation:
        """Have what an engine is to serve prepared while it serves: a version's files, or an offer.

        Args:
            target: what it is to serve.
            within: seconds to prepare files; an offer is only looked at.
        """
        if target.offered is not None:
            return await self.take(target.offered, _seconds_of(target.offered))
        if target.files is not None:
            return await self.prepare(target.files, within)
        return Unprepared("nothing is known of its files")

    async def prepare(self, files: VersionFiles, within: float) -> Preparation:
        """Have a version prepared while the engine serves. Gives up after `within` seconds."""
        early, self._early = self._early, None
        if not isinstance(self._rank_group, EngineRankGroup):
            return Unprepared("no plugin answers for it")
        prepared = await prepare(self._channels, self._rank_group, files, within, cast=self._cast, early=early)
        self._waiting = isinstance(prepared, Prepared)
        return prepared

    async def take(self, offered: Offered, within: float) -> Preparation:
        """Have an offer prepared while the engine serves. Gives up after `within` seconds."""
        if not isinstance(self._rank_group, EngineRankGroup):
            return PrepareRefused("no plugin answers for it")
        early, self._early = self._early, None
        prepared = await prepare_offer(self._channels, self._rank_group, offered, within, early)
        self._waiting = isinstance(prepared, Prepared)
        return prepared

    def is_done(self) -> None:
        """Note that a load was sent: it takes what was prepared."""
        self._waiting, self._early = False, None

    def was_loaded(self, how: str) -> None:
        """Note that a load succeeded. Ranks that may have learned a load plan are asked again at the next look."""
        if how == "load" or self.loader is not None:
            self._channels.doubt()

    async def forget(self) -> None:
        """Have the ranks close what they prepared and did not load."""
        self._early = None
        if self._waiting and isinstance(self._rank_group, EngineRankGroup):
            self._waiting = False
            await forget(self._channels, self._rank_group)

    async def contents(self, *, of_all: bool = False) -> list[str]:
        """The digests of what the ranks hold that answer an update; an empty one where a rank does not say.

        `of_all`: all ranks of this engine answer, not the first of each data-parallel one.
        """
        if not isinstance(self._rank_group, EngineRankGroup):
            return []
        ranks = self._rank_group.members if of_all else self._rank_group.first
        replies = await self._channels.ask_all(ranks, {"do": "contents"}, CONTENTS_SECONDS)
        return [str(reply.get("contents", "")) if isinstance(reply, dict) else "" for reply in replies]


def _seconds_of(offered: Offered) -> float:
    return SENT_SECONDS if offered.sent else OFFER_SECONDS
