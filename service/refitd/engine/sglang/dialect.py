"""SGLang's dialect: the only place that calls its HTTP API. `reply` and `info` decide, this acts."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit

from refitd.engine.fingerprints import BY_PLUGIN
from refitd.engine.http import (
    CALL_SECONDS,
    CHECK_SECONDS,
    CHECKSUMS_BYTES,
    PROBE_SECONDS,
    TRIAL_SECONDS,
    NoReply,
    Reply,
    Transport,
)
from refitd.engine.plugin import EnginePlugin
from refitd.engine.port import ChangeCheck, Obstacle, Reached, Target, Unreached
from refitd.engine.replies import Loading, Untouched, meaning_of_check, way_in
from refitd.engine.sglang.info import (
    OLDEST,
    TRIAL,
    WORDS,
    ModelInfo,
    PrefixStores,
    SglangRelease,
    SglangServerInfo,
    draft_of,
    fingerprint_in,
    obstacles,
    read_model_info,
    read_server_info,
    release_of,
    trial_fault,
    was_done,
    what_happened,
)
from refitd.engine.transaction import Before, Shown

CLEAR_SECONDS = 120.0  # the file backend deletes one file for each page
FLUSH_EVERY_SECONDS = 0.05
_UPDATE = "/update_weights_from_disk"
_CLEAR, _OLD_CLEAR = "/hicache/storage-backend/clear", "/clear_hicache_storage_backend"
_NEVER_TOLD = (None, "default")  # labels of a server that was never given one


class SglangDialect:
    """One SGLang server. See `Dialect`.

    /server_info goes through the loop that loads.
    """

    settles_by = "/server_info"
    plugin_minds_all = True  # it keeps every update away from a draft model with a checkpoint of its own
    each_rank_answers = False
    lost = None  # its answers are those to its calls

    def __init__(self, http: Transport, *, pause_mode: str = "auto", in_pair: bool = False) -> None:
        """Make no call yet. `pause_mode`: what it does with requests in flight while it loads; "auto" for the best that
        it can. `in_pair`: whether it is updated together with the servers that it hands prompts to, or gets them from.
        """
        self.http = http
        self._pause_mode = pause_mode
        self._in_pair = in_pair
        self._server: SglangServerInfo | None = None
        self._last: ModelInfo | None = None
        self._startup_path: str | None = None

    @property
    def is_known(self) -> bool:
        return self._server is not None

    @property
    def role(self) -> str | None:
        """Whether it prefills or decodes; None for a server that does both, or was not reached."""
        return None if self._server is None else self._server.role

    @property
    def bootstrap_port(self) -> int | None:
        """Where decode servers ask a prefill server for keys and values."""
        return None if self._server is None else self._server.disaggregation_bootstrap_port

    @property
    def _release(self) -> SglangRelease:
        return release_of("unknown") if self._server is None else self._server.release

    @property
    def _stores(self) -> PrefixStores:
        return PrefixStores() if self._server is None else self._server.stores

    async def probe(self) -> Reached | Unreached:
        """See `Dialect`. Asks for the launch settings only when the server may be another process than before."""
        reply = await self.http.get("/model_info", PROBE_SECONDS)
        info = read_model_info(reply, self.http.url)
        if isinstance(info, str):
            return Unreached(reason=info, advice=way_in(reply, WORDS), nothing_listens=reply.nothing_listens)
        if self._server is None or info != self._last:
            server = read_server_info(await self.http.get("/server_info", CALL_SECONDS), self.http.url)
            if isinstance(server, str):
                return Unreached(reason=server, advice=way_in(reply, WORDS))
            if not server.release.supported:
                oldest = ".".join(str(part) for part in OLDEST)
                reason = f"{self.http.url} is SGLang {server.version}; refitd needs {oldest} or newer"
                return Unreached(reason=reason, advice=f"install SGLang {oldest} or newer", recognised=True)
            self._server, self._last = server, info
            if server.release.names_startup or info.weight_version in _NEVER_TOLD:
                self._startup_path = server.model_path or self._startup_path
        return Reached(
            model_path=info.model_path,
            weight_version=info.weight_version,
            server_version=self._server.version,
            configuration=self._server.configuration,
            startup_path=self._startup_path,
            process=self._server.process,
            address=reply.address if isinstance(reply, Reply) else None,
            server="SGLang",
            draft=draft_of(self._server, self._startup_path),
        )

    async def find_plugin(self, plugin: EnginePlugin) -> None:
        if self._server is not None:
            await plugin.look(self._server.launch)

    def stock_reason(self, found: str | None) -> str | None:
        return found

    def obstacles(self, *, plugged: bool) -> Iterator[Obstacle]:
        if self._server is None:
            return iter(())
        draft = draft_of(self._server, self._startup_path)
        return obstacles(self._server, draft, plugged=plugged, in_pair=self._in_pair)

    async def left_alone(self) -> str | None:
        return None

    async def hold(
        self, target: Target, pausing: AbstractContextManager[None], within: float, *, plugged: bool
    ) -> Before | NoReply | str:
        """See `Dialect`. Prefixes beyond the GPU are cleared before the pause, where a failure leaves all as it was."""
        with pausing:
            fault = await self._clear() or await self._pause(self._mode_for(target), drains=self._drains)
        if fault is not None:
            return fault
        recorded = target.not_fingerprint
        if plugged:
            return Before()
        if recorded is not None and not recorded.startswith(BY_PLUGIN):
            return Before(fingerprint=recorded)
        contents = await self._contents()
        return contents if isinstance(contents, NoReply) else Before(fingerprint=contents)

    async def load(self, target: Target, within: float, *, plugged: bool) -> Loading:
        order: dict[str, Any] = {
            "model_path": target.path,
            "load_format": "auto",  # explicit: a server that was started with dummy weights would load dummies
            "weight_version": target.label,
            "flush_cache": True,
            "abort_all_requests": False,
            "torch_empty_cache": False,
        }
        reply = await self.http.post(_UPDATE, order, within)
        ranks = 1 if self._server is None else self._server.launch.dp_ranks
        return what_happened(reply, ranks, drafts=self._server is None or self._server.drafts)

    async def untouched(self, before: Before) -> Shown:
        after = await self._contents()
        if isinstance(after, NoReply):
            return Shown(fault=after.reason)
        fault = None if after == before.fingerprint else "its tensors are not what they were"
        return Shown(fingerprint=after, fault=fault)

    async def verify(self, target: Target, answered: str | None) -> Shown:
        """See `Dialect`. Prefixes beyond the GPU are cleared once more, now that nothing writes any.

        Path and label are only names: SGLang sets the path before it loads. The plugin answers for both.
        """
        if (kept := await self._clear()) is not None:
            return Shown(fault=f"cannot be verified: {kept.reason if isinstance(kept, NoReply) else kept}")
        if answered is not None:
            return Shown(fingerprint=answered)
        reply, contents = await asyncio.gather(self.http.get("/model_info", PROBE_SECONDS), self._contents())
        says = read_model_info(reply, self.http.url)
        if isinstance(says, str):
            return Shown(fault=f"cannot be verified: {says}")
        if isinstance(contents, NoReply):
            return Shown(fault=f"its tensors cannot be verified: {contents.reason}")
        # A load of ours that fails leaves the old name or the new one.
        names = {target.path, None if self._last is None else self._last.model_path, self._startup_path}
        fault = says.other_than(target.path, target.label)
        return Shown(fingerprint=contents, fault=fault, overwritten=says.model_path not in names)

    def serves(self, target: Target, fingerprint: str | None) -> None:
        self._last = ModelInfo(model_path=target.path, weight_version=target.label)

    async def contents(self, alike: str | None) -> str | None:
        contents = await self._contents()
        return None if isinstance(contents, NoReply) else contents

    async def trial(self, label: str) -> str | None:
        return trial_fault(await self.http.ask("/generate", TRIAL, TRIAL_SECONDS), label)

    async def trial_with(self, prefill: "SglangDialect", room: int, label: str) -> str | None:
        """As `trial`, of a server that decodes what another prefills, asked as their router asks both."""
        host = urlsplit(prefill.http.url).hostname
        bootstrap = {"bootstrap_host": host, "bootstrap_port": prefill.bootstrap_port}
        body = TRIAL | bootstrap | {"bootstrap_room": room}
        both = (each.http.ask("/generate", body, TRIAL_SECONDS) for each in (prefill, self))
        replies = await asyncio.gather(*both)
        return next((fault for reply in replies if (fault := trial_fault(reply, label)) is not None), None)

    async def resume(self) -> bool:
        return was_done(await self.http.post("/continue_generation", {"torch_empty_cache": False}, CALL_SECONDS))

    async def check_changes(self) -> ChangeCheck:
        return await check_changes(self.http)

    async def _contents(self) -> str | NoReply | None:
        """The fingerprint. None means that the server cannot tell; that a server is lost is no reason to believe it."""
        reply = await self.http.post("/weights_checker", {"action": "checksum"}, CHECK_SECONDS, most=CHECKSUMS_BYTES)
        return reply if isinstance(reply, NoReply) else await asyncio.to_thread(fingerprint_in, reply)

    def _mode_for(self, target: Target) -> str:
        # Answers say which part came from which label. The same step of another run has the same label: no answer may
        # continue through such a load, since its parts could not be told apart afterwards.
        says = self._last
        is_renewed = says is not None and says.weight_version == target.label and says.model_path != target.path
        if self._in_pair:  # no request may hold keys and values that another server computes with
            return "abort"
        return self._release.pause_mode("abort" if is_renewed else self._pause_mode)

    @property
    def _drains(self) -> bool:
        return self._in_pair or self._release.dies_of_flush

    async def _pause(self, mode: str, *, drains: bool) -> NoReply | str | None:
        """Pause; why it could not be done, None where it was. `drains`: wait as well until nothing runs any more."""
        reply = await self.http.post("/pause_generation", {"mode": mode}, CALL_SECONDS)
        if isinstance(reply, NoReply):
            return reply
        if not was_done(reply):
            happened = what_happened(reply)
            return happened.reason if isinstance(happened, Untouched) else f"cannot be paused: {reply.short_message}"
        return await self._drained() if drains else None

    async def _drained(self) -> NoReply | str | None:
        """Wait until a flush goes well: nothing runs any more, so the one that ends the load will not kill it."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                while True:
                    reply = await self.http.post("/flush_cache", {}, CALL_SECONDS)
                    if isinstance(reply, NoReply):
                        return reply
                    if reply.ok:
                        return None
                    await asyncio.sleep(FLUSH_EVERY_SECONDS)
        except TimeoutError:
            return f"requests still run {CALL_SECONDS:g} s after the pause; SGLang before 0.5.22 would die of the load"

    async def _clear(self) -> NoReply | str | None:
        """Clear prefixes beyond the GPU; why that did not go well, None where it did or there are none."""
        if not self._stores.cleared:
            return None
        reply = await self.http.post(_CLEAR, {}, CLEAR_SECONDS)
        if isinstance(reply, Reply) and reply.has_no_route:
            reply = await self.http.post(_OLD_CLEAR, {}, CLEAR_SECONDS)
        if isinstance(reply, NoReply):
            return reply
        if reply.ok and "cleared" in reply.text:  # which a proxy's page with a 200 does not say
            return None
        return f"its prefixes beyond the GPU (HiCache, LMCache) were not cleared: {_CLEAR} was answered {reply.status}"


async def check_changes(http: Transport) -> ChangeCheck:
    """Find out whether a key opens changes, by an update that names no model: SGLang checks the key first, and then
    refuses the request as incomplete. Nothing is paused and nothing is loaded.
    """
    reply = await http.post(_UPDATE, {}, PROBE_SECONDS)
    opens = isinstance(reply, Reply) and reply.is_incomplete
    return meaning_of_check(reply, WORDS, f"an update ({_UPDATE}) that names no model", opens=opens)
