"""refitd's plugin in a server in memory: transactions, deltas in place, and weights from a trainer's memory.

What it keeps to is that of `refitd_sglang` and `refitd_vllm`: it checks before it writes, answers with what it left
behind, and puts back what was there where a load fails and that can still be had. `SimBeside` is the service's side of
its channel.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from refitd.engine.plugin import Launch, PluginSeen, Preparation, Prepared, PrepareRefused, Unprepared
from refitd.engine.port import Coming, Offered, RankProof, VersionFiles
from refitd_client.contract.naming import parse_version_folder, parse_version_id, version_id
from refitd_client.contract.plugin import Answer, UpdateOutcome
from refitd_inside.client.client import AHEAD_SECONDS, OFFER_SECONDS, SENT_SECONDS, PluginClient

from .disk import Make, SimFolder, seen_at, signature_of
from .fault import Call, DiedError, Fault
from .offer import Sending, SimOffer
from .proving import found

if TYPE_CHECKING:
    from .server import SimServer

RELEASE = "0.1.0"
BASE = 0  # the content of the start-up weights
STARTUP = "/models/base"
_BAD = frozenset({Make.MISSING, Make.SHAPE, Make.FLIPPED})
_PLAIN = frozenset({Make.PLAIN, Make.HALF})


class _RefusedError(Exception):
    """Before the first write. `needs` as in `Answer`."""

    def __init__(self, reason: str, needs: str = "") -> None:
        super().__init__(reason)
        self.needs = needs


@dataclass(frozen=True, slots=True)
class _Way:
    """A version that was looked at: a folder, or an offer. `promised` is what it leads to."""

    path: str
    version: str
    promised: int
    source: SimFolder | SimOffer
    signature: str

    @property
    def is_unchanged(self) -> bool:
        if isinstance(self.source, SimOffer):
            return self.source.is_lent
        return signature_of(self.source) == self.signature


@dataclass(frozen=True, slots=True)
class _Standing:
    """What is served: `base` is what a full version of it would be put back from, None while that has no files.
    `files`: they are to follow.
    """

    version: str
    path: str
    content: int
    base: SimFolder | None
    base_content: int
    files: bool = True


class SimPlugin:
    """One engine's. What it knows is gone with its process."""

    def __init__(self, server: "SimServer") -> None:
        self._server = server
        self._prepared: _Way | None = None
        self.standing: _Standing | None = None

    def restart(self) -> None:
        self._prepared = self.standing = None

    def lost_track(self) -> None:
        self.standing = None

    def minds(self, path: str) -> bool:
        """Whether an update is the plugin's: what has no manifest, copies among it, is SGLang's own."""
        disk = self._server.disk
        if path in disk.folders:
            return disk.folders[path].make not in _PLAIN or path in disk.described
        return parse_version_folder(path.rpartition("/")[2]) is not None

    def prepare(self, files: VersionFiles) -> None:
        way = self._look(files.path)
        if isinstance(way.source, SimFolder) and way.signature != files.signature:
            manifest = seen_at(files.path, way.source).structure.manifest
            if manifest is None or manifest.digest != files.digest:
                raise _RefusedError("it is another version")
        self._prepared = way

    def prefetch(self, coming: Coming) -> str:
        """Look at a version that may turn out to be bad; what its files look like from outside."""
        self._prepared = self._look(coming.path)
        return self._prepared.signature

    def prove(self, path: str, content: int, ranks: int) -> list[RankProof]:
        """What its ranks find, who began to read when the folder held `content`."""
        folder = self._server.disk.folders.get(path)
        if self._server.disk.hidden or folder is None:
            raise _RefusedError("there is nothing")
        seen, damage = seen_at(path, folder).structure, {"flipped": folder.make is Make.FLIPPED}
        damage["nan"] = folder.make is Make.NAN
        self._server.disk.counts["proofs"] += 1
        return [found(seen, content, rank, ranks, **damage) for rank in range(ranks)]

    def offer_of(self, offered: Offered) -> SimOffer:
        self._follow()
        if self.standing is not None and self.standing.base is None and self.standing.files:
            raise _RefusedError("what is served came from memory, and has no files yet to be put back from")
        offer = self._server.disk.offers.get(offered.offer)
        if offer is None or not offer.is_lent:
            raise _RefusedError("the offer was withdrawn, or its trainer is gone")
        if (offer.version, offer.path) != (offered.version, offered.path):
            raise _RefusedError("the offer is of another version")
        return offer

    async def received(self, offer: SimOffer, within: float) -> SimOffer:
        """What this host's receivers get of an offer that is sent: they compare it with the fingerprints."""
        offer.readers += 1
        try:
            await self._sent(offer, within)
            if offer.sending in {Sending.SILENT, Sending.BREAKS} or not offer.is_lent:
                raise _RefusedError("it was not received: its sender is gone, or silent")
            arrived = offer.arrived()
        finally:
            offer.readers -= 1
        if arrived.content != arrived.promised:
            raise _RefusedError("it was not received: other bytes have arrived")
        self._server.disk.counts["received"] += 1
        return arrived

    async def _sent(self, offer: SimOffer, within: float) -> None:
        """Wait for the last byte, for the end of the sender, or for the deadline."""
        if offer.sending is not Sending.SILENT:
            await asyncio.sleep(self._server.chance.random() * 2.0)
            return
        for _ in range(round(within)):
            if not offer.is_lent:
                return
            await asyncio.sleep(1.0)

    def take(self, offer: SimOffer) -> None:
        self._prepared = _Way(offer.path, offer.version, offer.promised, offer, "")

    def forget(self) -> None:
        self._prepared = None

    async def load(self, path: str, fault: Fault | None) -> Answer:
        answer = await self._load(path, fault)
        self._server.disk.counts[answer.outcome.value] += 1
        return answer

    async def _load(self, path: str, fault: Fault | None) -> Answer:
        if (again := self._again(path)) is not None:
            return again
        try:
            way = self._chosen(path, fault)
            self._fit(way)
        except _RefusedError as refused:
            return Answer(outcome=UpdateOutcome.REFUSED, reason=str(refused), needs=refused.needs)
        return await self._commit(way, fault)

    def _chosen(self, path: str, fault: Fault | None) -> _Way:
        way, self._prepared = self._prepared, None
        if fault is Fault.REFUSES:
            raise _RefusedError("it does not like it")
        if way is None or way.path != path:
            return self._look(path)
        if not way.is_unchanged:
            raise _RefusedError("it is not what it was when it was prepared")
        return way

    async def _commit(self, way: _Way, fault: Fault | None) -> Answer:
        server, before, known = self._server, self._server.tensors, self.standing
        is_delta = isinstance(way.source, SimFolder) and way.source.make is Make.DELTA
        previous = self._previous() or is_delta  # of a delta it keeps what it overwrites
        if isinstance(way.source, SimOffer):
            way.source.readers += 1
        else:
            server.reading = way.source
        try:
            first = way.source.content
            server.tensors = (first, first, *before[2:])  # here it is a mixture
            await asyncio.sleep(server.chance.random() * 0.2)
            if fault is Fault.DIES:
                raise DiedError
            server.tensors = (first, first, way.source.content, way.source.content)
            await asyncio.sleep(server.chance.random() * 0.05)
            stands = not isinstance(way.source, SimOffer) or way.source.is_lent
        finally:
            if isinstance(way.source, SimOffer):
                way.source.readers -= 1
        if fault is Fault.UNCLEAR:
            self.standing, server.tensors = None, (first, first, *before[2:])
            return Answer(outcome=UpdateOutcome.UNKNOWN, reason="a rank does not answer")
        if fault is Fault.ROLLBACK or not stands or set(server.tensors) != {way.promised}:
            return self._restored(before, known, previous, is_delta=is_delta)
        self.standing = self._after(way)
        self._server.disk.counts["taken" if isinstance(way.source, SimOffer) else way.source.make.value] += 1
        return Answer(outcome=UpdateOutcome.SERVED, version=way.version, contents=self.contents, proved=1)

    @property
    def contents(self) -> str:
        return f"{hash(self._server.tensors) & (1 << 128) - 1:032x}"

    def _again(self, path: str) -> Answer | None:
        """What is served already from a path that it cannot come from again."""
        held = self.standing
        is_prepared = self._prepared is not None and self._prepared.path == path
        if is_prepared or held is None or held.path != path or set(self._server.tensors) != {held.content}:
            return None
        folder = self._server.disk.folders.get(path)
        if held.base is not None and (folder is None or folder.make is not Make.DELTA):
            return None
        return Answer(outcome=UpdateOutcome.SERVED, version=held.version, contents=self.contents)

    def _look(self, path: str) -> _Way:
        disk = self._server.disk
        folder = None if disk.hidden else disk.folders.get(path)
        if folder is None:
            raise _RefusedError("there is nothing")
        is_described = disk.described.get(path) == signature_of(folder)
        if folder.make in _BAD or (folder.make in _PLAIN and not is_described):
            raise _RefusedError("it is not one to load into this model")
        run, _, name = path.rpartition("/")
        order = parse_version_folder(name)
        assert order is not None
        way = _Way(path, version_id(run, order), folder.content, folder, signature_of(folder))
        self._fit(way)
        return way

    def _fit(self, way: _Way) -> None:
        if isinstance(way.source, SimOffer) or way.source.make is not Make.DELTA:
            return
        held = self.standing
        if held is None or set(self._server.tensors) != {held.content}:
            raise _RefusedError("nothing is known of the weights in memory", "full")
        base, on, to = (parse_version_id(each or "") for each in (way.source.base, held.version, way.version))
        assert to is not None
        leads = way.source.base == held.version
        if not leads and base is not None and on is not None:
            leads = base[1].generation == on[1].generation and base[1].step <= on[1].step and on[1] < to[1]
        if not leads or held.content not in way.source.onto:
            raise _RefusedError(f"it does not lead from {held.version}", "full")

    def _after(self, way: _Way) -> _Standing:
        if isinstance(way.source, SimOffer):
            return _Standing(way.version, way.path, way.promised, None, way.promised, way.source.files)
        if way.source.make is Make.DELTA and self.standing is not None:
            return replace(self.standing, version=way.version, path=way.path, content=way.promised)
        return _Standing(way.version, way.path, way.promised, way.source, way.promised)

    def _follow(self) -> None:
        held = self.standing
        if held is not None and held.base is None and not self._server.disk.hidden:
            folder = self._server.disk.folders.get(held.path)
            if folder is not None and folder.make is Make.GOOD:
                self.standing = replace(held, base=folder)

    def _previous(self) -> bool:
        """Whether what is served can be put back, as far as can be seen before the first write."""
        self._follow()
        if self.standing is not None:
            return self.standing.base is not None
        return self._server.path == STARTUP and set(self._server.tensors) == {BASE}

    def _restored(self, before: tuple[int, ...], known: _Standing | None, previous: bool, *, is_delta: bool) -> Answer:
        held = self.standing if self.standing is not None else known
        is_whole = is_delta or held is None or held.base is None or held.base.content == held.base_content
        if previous and is_whole:
            self._server.tensors = before
            return Answer(outcome=UpdateOutcome.RESTORED, reason="the copy failed")
        self.standing = None
        return Answer(outcome=UpdateOutcome.UNKNOWN, reason="what was there could not be put back")


def plugin_of(server: "SimServer", alive: Callable[[], bool]) -> PluginClient:
    return SimBeside(server, alive) if server.plugged else PluginClient(None, allow_dtype_cast=False)


class SimBeside(PluginClient):
    """The channel to an engine's plugin, without sockets."""

    def __init__(self, server: "SimServer", alive: Callable[[], bool]) -> None:
        """`alive` says whether the service's process is there, which speaks."""
        super().__init__(None, allow_dtype_cast=False)
        self._server, self._alive = server, alive
        self._boot = 0
        self._seen_ahead: tuple[str, str, int] | None = None  # a path, what its files looked like, to which process
        self._taken_ahead: tuple[Offered, Preparation] | None = None

    async def look(self, launch: Launch) -> None:
        self._boot = self._server.boots
        proves = self._server.proves
        is_there = PluginSeen(release=RELEASE, takes_offers=True, proves=proves)
        self.seen = is_there if self._server.up else PluginSeen(reason="no plugin answers for it")

    def is_done(self) -> None:
        super().is_done()
        self._seen_ahead = self._taken_ahead = None

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        self._seen_ahead, self._waiting, within = None, True, AHEAD_SECONDS
        if isinstance(version, Offered):
            within = SENT_SECONDS if version.sent else OFFER_SECONDS
            self._taken_ahead = version, await self.take(version, within)
            return ()
        plugin, fault = self._server.plugin, self._server.faults.pop(Call.PREPARE, None)
        if not await self._reached(fault, within) or plugin is None:
            return ()
        with suppress(_RefusedError):
            self._seen_ahead = version.path, plugin.prefetch(version), self._boot
            folder = self._server.disk.folders.get(version.path)
            if version.prove and folder is not None:
                began = folder.content
                await asyncio.sleep(self._server.chance.random() * 0.1)
                if await self._reached(None, within):
                    return plugin.prove(version.path, began, self._server.ranks)
        return ()

    async def prepare(self, files: VersionFiles, within: float) -> Preparation:
        seen, self._seen_ahead = self._seen_ahead, None
        if seen == (files.path, files.signature, self._boot):
            return Prepared()
        plugin, fault = self._server.plugin, self._server.faults.pop(Call.PREPARE, None)
        if not await self._reached(fault, within) or plugin is None:
            return Unprepared("a rank does not answer")
        try:
            plugin.prepare(files)
        except _RefusedError as refused:
            return PrepareRefused(str(refused), needs_full=refused.needs == "full")
        if fault is Fault.CUT_AFTER:
            plugin.forget()
            return Unprepared("a rank does not answer")
        self._waiting = True
        return Prepared()

    async def take(self, offered: Offered, within: float) -> Preparation:
        ahead, self._taken_ahead = self._taken_ahead, None
        if ahead is not None and ahead[0] == offered:
            return ahead[1]
        plugin, fault = self._server.plugin, self._server.faults.pop(Call.PREPARE, None)
        if not await self._reached(fault, within) or plugin is None or fault is Fault.CUT_AFTER:
            return PrepareRefused("a rank does not answer")
        try:
            offer = plugin.offer_of(offered)
            if offer.sending is not None:
                offer = await plugin.received(offer, within)
                if not await self._reached(None, within):
                    return PrepareRefused("a rank does not answer")
        except _RefusedError as refused:
            return PrepareRefused(str(refused))
        plugin.take(offer)
        self._waiting = True
        return Prepared()

    async def forget(self) -> None:
        self._seen_ahead = self._taken_ahead = None
        if self._waiting and self._server.plugin is not None and self._alive():
            self._waiting = False
            self._server.plugin.forget()

    async def contents(self, *, of_all: bool = False) -> list[str]:
        await asyncio.sleep(self._server.chance.random() * 0.01)
        plugin = self._server.plugin
        held = plugin.contents if plugin is not None and await self._reached(None, 0.0) else ""
        return [held] * (self._server.ranks if of_all else 1)

    async def _reached(self, fault: Fault | None, within: float) -> bool:
        await asyncio.sleep(within if fault is Fault.SLOW else self._server.chance.random() * 0.02)
        if not self._alive():
            raise asyncio.CancelledError
        if fault is Fault.DIES:
            self._server.die()
        lost = fault in {Fault.SLOW, Fault.CUT_BEFORE, Fault.GARBAGE}
        return self._server.up and self._server.boots == self._boot and not lost


def spoken(answer: Answer, path: str, label: str) -> tuple[int, dict[str, Any]]:
    """The reply to an update, as SGLang sends it: its status and its body."""
    if answer.outcome is not UpdateOutcome.SERVED:
        return 400, {"success": False, "message": answer.message}
    return 200, {"success": True, "message": f"{answer.message} Weight version updated to {label}."}
