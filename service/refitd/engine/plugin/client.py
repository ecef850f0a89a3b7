"""refitd's plugin beside one engine's HTTP API, as the adapter uses it: who speaks, prepare, forget, contents."""

from pathlib import Path

from refitd.engine.plugin.channels import Channels
from refitd.engine.plugin.leading import Leading, Leads
from refitd.engine.plugin.prepared import (
    Early,
    Order,
    Preparation,
    Ready,
    Refused,
    Unprepared,
    forget,
    prepare,
    prepare_early,
)
from refitd.engine.plugin.rank_group import EngineRankGroup, Launch, Stock
from refitd.engine.plugin.taken import prepare_offer, request_for
from refitd.engine.port import Coming, Files, Loader, Offered, Target

CONTENTS_SECONDS = 120.0  # to fingerprint all tensors, while the engine serves


class PluginClient:
    """`root` is the folder that the sockets are in, None where there is none to look in."""

    def __init__(self, root: Path | None, *, allow_dtype_cast: bool, leads: Leads | None = None) -> None:
        self._channels = Channels(root)
        self._leading = None if leads is None else Leading(self._channels, leads)
        self._cast = allow_dtype_cast
        self._rank_group: EngineRankGroup | Stock | None = None
        self._waiting = False  # whether its ranks may hold a version that was prepared and not loaded
        self._early: Early | None = None

    @property
    def release(self) -> str | None:
        """The plugin's, None where the engine's loads are its own."""
        return self._rank_group.release if isinstance(self._rank_group, EngineRankGroup) else None

    @property
    def takes_offers(self) -> bool:
        """Whether the engine can load from the memory of a trainer on its host."""
        return isinstance(self._rank_group, EngineRankGroup) and self._rank_group.takes_offers

    @property
    def reason(self) -> str | None:
        """Why its loads are its own."""
        return self._rank_group.reason if isinstance(self._rank_group, Stock) else None

    @property
    def led_by(self) -> str | None:
        """Which other service leads the engine, in a sentence."""
        return None if self._leading is None else self._leading.led_by

    @property
    def loader(self) -> Loader | None:
        """What the plugin does not copy by itself, as of the last time that its ranks were greeted."""
        return self._rank_group.loader if isinstance(self._rank_group, EngineRankGroup) else None

    def vouches_for(self, target: Target) -> bool:
        """Whether the answer to a load will say what it left behind."""
        return (target.files is not None or target.offered is not None) and self.release is not None

    async def look(self, launch: Launch) -> None:
        """Find out who speaks for the engine that was started so."""
        self._rank_group = await self._channels.rank_group(launch)
        if self._leading is not None:
            await self._leading.say(self._rank_group)

    async def prefetch(self, version: Coming | Offered, within: float) -> None:
        """Have a version made ready while the engine serves and the service is not yet done with it, within seconds."""
        if isinstance(self._rank_group, EngineRankGroup):
            is_offer = isinstance(version, Offered)
            request = request_for(version) if is_offer else Order(version, self._cast).request("headers")
            self._early, self._waiting = None, True
            self._early = await prepare_early(self._channels, self._rank_group, request, within)

    async def prepare(self, files: Files, within: float) -> Preparation:
        """Have the version checked while the engine serves, within seconds."""
        early, self._early = self._early, None
        if not isinstance(self._rank_group, EngineRankGroup):
            return Unprepared("no plugin speaks for it")
        prepared = await prepare(self._channels, self._rank_group, files, within, cast=self._cast, early=early)
        self._waiting = isinstance(prepared, Ready)
        return prepared

    async def take(self, offered: Offered, within: float) -> Preparation:
        """Have a version in a trainer's memory looked at while the engine serves, within seconds."""
        if not isinstance(self._rank_group, EngineRankGroup):
            return Refused("no plugin speaks for it")
        early, self._early = self._early, None
        prepared = await prepare_offer(self._channels, self._rank_group, offered, within, early)
        self._waiting = isinstance(prepared, Ready)
        return prepared

    def is_done(self) -> None:
        """A load was sent: what was prepared was taken, or will be."""
        self._waiting, self._early = False, None

    def was_loaded(self, how: str) -> None:
        """A load came through. Ranks that may have learned a plan by it are greeted again at the next look."""
        if how == "load" or self.loader is not None:
            self._channels.doubt()

    async def forget(self) -> None:
        """Have what was prepared closed, where no load came of it."""
        self._early = None
        if self._waiting and isinstance(self._rank_group, EngineRankGroup):
            self._waiting = False
            await forget(self._channels, self._rank_group)

    async def contents(self) -> list[str]:
        """The digests of what the ranks hold that answer an update; an empty one where a rank does not say."""
        if not isinstance(self._rank_group, EngineRankGroup):
            return []
        replies = await self._channels.ask_all(self._rank_group.first, {"do": "contents"}, CONTENTS_SECONDS)
        return [str(reply.get("contents", "")) if isinstance(reply, dict) else "" for reply in replies]
