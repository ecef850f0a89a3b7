"""The adapter to SGLang: the only place that knows its HTTP API. `reply` and `verify` decide, this acts.

The transaction of one refit, and what is sent when it breaks off:

    settle    a load whose end is not known may still run: wait for it, send nothing beside it
    clear     prefixes beyond the GPU, here and before verify (`stores`): broke off → nothing was paused
    prepare   where the engine has refitd's plugin: it checks the version while it serves; refused → nothing was paused
    pause     broke off → resume, contents are known
    load      refused → prove untouched → resume; unclear → nothing: the engine stays paused, its contents are unknown
    verify    doubt → nothing, likewise
    resume    lost → reported in the result, and the reconciler tries again

A server that prefills for others, or decodes for them, takes these steps together with them (`unit.py`).

With the plugin the answer to the load says what the engine holds, and there is nothing to prove: no checksums are
computed before or after it, and it is not asked what it serves.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from refitd.engine.dialing import Guard
from refitd.engine.fingerprints import BY_PLUGIN
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS, PROBE_SECONDS, TRIAL_SECONDS
from refitd.engine.load_reply import Loaded, Unclear, Untouched
from refitd.engine.plugin.channels import SocketList
from refitd.engine.plugin.client import PluginClient
from refitd.engine.plugin.leading import Leads
from refitd.engine.plugin.prepared import PrepareRefused
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    Obstacle,
    Offered,
    Outcome,
    RankProof,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.sglang import access, calls
from refitd.engine.sglang.info import (
    OLDEST,
    Dialect,
    ModelInfo,
    SglangServerInfo,
    dialect_of,
    read_model_info,
    read_server_info,
)
from refitd.engine.sglang.obstacles import draft_of, obstacles, refusal
from refitd.engine.sglang.reply import NotFlushed, fingerprint, what_happened
from refitd.engine.sglang.stores import PrefixStores, clear
from refitd.engine.sglang.verify import OTHER_TENSORS, TRIAL, Says, doubt, trial_fault

_NEVER_TOLD = (None, "default")  # labels of a server that was never given one


class SglangEngine:
    """One SGLang server behind the `Engine` port.

    Attributes:
        in_unit: whether it is one of several servers that are updated together.
    """

    in_unit = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | Path | None = None,
        admin_key: str | Path | None = None,
        pause_mode: str = "auto",
        load_timeout: float = 600.0,
        guard: Guard | None = None,
        root: Path | None = None,
        allow_dtype_cast: bool = False,
        leads: Leads | None = None,
        sockets: SocketList | None = None,
    ) -> None:
        """Make no call yet.

        Args:
            url: of the server.
            api_key: opens reads, as for `Transport`.
            admin_key: opens changes, as for `Transport`.
            pause_mode: what the engine does with requests in flight while it loads; "auto" for the best that it can.
            load_timeout: seconds that a load may take.
            guard: says which addresses may be called.
            root: where the plugin's sockets are, as the service sees it.
            allow_dtype_cast: whether the engine may cast tensors to its own dtype.
            leads: the lease that the service asks the plugin for; None for a reader that leads no engine.
            sockets: of the root, listed once for all servers.
        """
        self._http = Transport(url, api_key=api_key, admin_key=admin_key, guard=guard)
        self._root = root
        self._plugin = PluginClient(root, allow_dtype_cast=allow_dtype_cast, leads=leads, sockets=sockets)
        self._pause_mode = pause_mode
        self._load_timeout = load_timeout
        self._server: SglangServerInfo | None = None
        self._stores = PrefixStores()
        self._last: ModelInfo | None = None
        self._startup_path: str | None = None
        self._unsettled = False  # whether a load was sent whose end is not known

    async def aclose(self) -> None:
        """See `Engine`. No connection is kept from one call to the next."""
        await self._plugin.forget()

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. Asks for the launch settings only when the server may be another process than before."""
        reply = await self._http.get("/model_info", PROBE_SECONDS)
        info = read_model_info(reply, self._http.url)
        if isinstance(info, str):
            return Unreached(reason=info, advice=access.way_in(reply), nothing_listens=reply.nothing_listens)
        if self._server is None or info != self._last:
            server = read_server_info(await self._http.get("/server_info", CALL_SECONDS), self._http.url)
            if isinstance(server, str):
                return Unreached(reason=server, advice=access.way_in(reply))
            if not server.dialect.supported:
                oldest = ".".join(str(part) for part in OLDEST)
                reason = f"{self._http.url} is SGLang {server.version}; refitd needs {oldest} or newer"
                advice = f"install SGLang {oldest} or newer"
                return Unreached(reason=reason, advice=advice, recognised=True)
            self._server, self._last, self._stores = server, info, server.stores
            if server.dialect.names_startup or info.weight_version in _NEVER_TOLD:
                self._startup_path = server.model_path or self._startup_path
        await self._plugin.look(self._server.launch)
        return Reached(
            model_path=info.model_path,
            weight_version=info.weight_version,
            server_version=self._server.version,
            # What the plugin computes and what SGLang does cannot be compared: each has records of its own.
            configuration=self._server.configuration + (" refitd" if self._plugin.release is not None else ""),
            startup_path=self._startup_path,
            plugin=self._plugin.release,
            takes_offers=self._plugin.takes_offers,
            receivers=self._plugin.receivers,
            proves=self._plugin.proves,
            stock_reason=self._plugin.reason,
            process=self._server.process,
            address=reply.address if isinstance(reply, Reply) else None,
            led_by=self._plugin.led_by,
            loader=self._plugin.loader,
            server="SGLang",
            obstacles=(*self._stores.obstacles(), *self._obstacles(self._server)),
            draft=draft_of(self._server, self._startup_path),
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        watch = Stopwatch(on_stage)
        if self._server is None and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        if self._unsettled and (fault := await self._settle()) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=fault)
        if (reason := self._refusal(target)) is not None:
            needs_full = target.in_place and self._plugin.release is None
            return await self._as_before(reason, None, target, watch, needs_full=needs_full)
        if self._plugin.vouches_for(target) or target.offered is not None:
            with watch.during(Stage.PREPARE):
                prepared = await self._plugin.prepare_for(target, self._load_timeout)
            if isinstance(prepared, PrepareRefused):
                needs_full = target.in_place and prepared.needs_full
                return await self._as_before(prepared.reason, None, target, watch, needs_full=needs_full)
        else:
            await self._plugin.forget()  # what others wrote SGLang loads by itself
        try:
            with watch.during(Stage.PAUSE):
                fault = await clear(self._http, self._stores) or await self._pause(target)
            before = None if fault is not None else await self._before(target)
            if isinstance(before, NoReply):
                fault, before = before, None
            fault = await self._others_paused() if fault is None else fault
        except asyncio.CancelledError:
            if not target.repairs:
                await self._resume_after_refit()  # no load was sent: its contents are known
            await asyncio.shield(self._plugin.forget())
            raise
        if fault is not None:
            back = await self._back(fault, target, watch)
            await self._plugin.forget()
            return back
        return await self._load(target, before, watch)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        return await self._plugin.prefetch(version)

    async def cancel_prefetch(self) -> None:
        await self._plugin.forget()

    async def fingerprint(self, alike: str | None = None) -> str | None:
        if self._plugin.release is not None and (alike is None or alike.startswith(BY_PLUGIN)):
            return fingerprint(await self._plugin.contents())
        contents = await self._contents()
        return None if isinstance(contents, NoReply) else contents

    async def trial(self, label: str) -> str | None:
        return trial_fault(await self._http.ask("/generate", TRIAL, TRIAL_SECONDS), label)

    async def resume(self) -> bool:
        return await calls.resume(self._http)

    async def check_changes(self) -> ChangeCheck:
        return await access.check_changes(self._http)

    @property
    def _drafts(self) -> bool:
        return self._server is None or self._server.drafts

    @property
    def _dp_ranks(self) -> int:
        return 1 if self._server is None else self._server.launch.dp_ranks

    @property
    def _dialect(self) -> Dialect:
        return self._server.dialect if self._server is not None else dialect_of("unknown")

    async def _settle(self) -> str | None:
        """Wait until a load whose end is not known has ended."""
        fault = await calls.settle(self._http, self._load_timeout)
        self._unsettled = fault is not None
        return fault

    async def _contents(self) -> str | NoReply | None:
        """The fingerprint. None means that the server cannot tell; that a server is lost is no reason to believe it."""
        return await calls.contents(self._http) if self._dialect.checksums else None

    async def _before(self, target: Target) -> str | NoReply | None:
        """The fingerprint before the load, by which a refusal is proved. The plugin's word needs no proof."""
        if self._plugin.vouches_for(target):
            return None
        recorded = target.not_fingerprint
        return recorded if recorded is not None and not recorded.startswith(BY_PLUGIN) else await self._contents()

    async def _pause(self, target: Target) -> NoReply | str | None:
        # Answers say which part came from which label. The same step of another run has the same label: no answer may
        # continue through such a load, since its parts could not be told apart afterwards.
        says = self._last
        is_renewed = says is not None and says.weight_version == target.label and says.model_path != target.path
        mode = self._dialect.pause_mode("abort" if is_renewed else self._pause_mode)
        return await calls.pause(self._http, mode, drains=self._dialect.dies_of_flush)

    async def _others_paused(self) -> str | None:
        """Wait until a load may be sent; why it may not, None where it may. One server alone waits for nothing."""
        return None

    async def _resume_after_refit(self) -> bool:
        """Let it generate at the end of a refit, also where that is cancelled; False if the call did not succeed."""
        return await asyncio.shield(self.resume())

    def _refusal(self, target: Target) -> str | None:
        """Why nothing is asked of it; None where the refit goes on."""
        if target.in_place and self._plugin.release is None:
            return "its plugin is gone, and only the plugin can write a delta into what it serves"
        return None if self._server is None else refusal(self._obstacles(self._server))

    def _obstacles(self, server: SglangServerInfo) -> Iterator[Obstacle]:
        plugged, draft = self._plugin.release is not None, draft_of(server, self._startup_path)
        return obstacles(server, draft, plugged=plugged, in_unit=self.in_unit)

    async def _back(self, fault: NoReply | str, target: Target, watch: Stopwatch) -> Refit:
        """The pause broke off: no load was sent, so its contents are as before; if they are known, it is resumed."""
        if isinstance(fault, str):
            return await self._as_before(fault, None, target, watch)
        resumed = fault.lost is CallFailure.NEVER_SENT
        if not resumed and not target.repairs:
            with watch.during(Stage.RESUME):
                resumed = await self._resume_after_refit()
        return Refit(outcome=Outcome.UNREACHABLE, resumed=resumed, reason=fault.reason, timings=watch.milliseconds)

    async def _as_before(
        self, reason: str, contents: str | None, target: Target, watch: Stopwatch, *, needs_full: bool = False
    ) -> Refit:
        """It refused, and its contents are as before: it is resumed, unless they are unknown."""
        if target.repairs:
            return _tainted(reason, watch)
        with watch.during(Stage.RESUME):
            resumed = await self._resume_after_refit()
        return Refit(
            outcome=Outcome.NACK,
            resumed=resumed,
            reason=reason,
            fingerprint=contents,
            needs_full=needs_full,
            timings=watch.milliseconds,
        )

    async def _load(self, target: Target, before: str | None, watch: Stopwatch, *, again: bool = False) -> Refit:
        self._unsettled = True
        with watch.during(Stage.LOAD):
            reply = await self._http.post("/update_weights_from_disk", _order(target), self._load_timeout)
        self._unsettled = isinstance(reply, NoReply)
        self._plugin.is_done()
        happened = what_happened(reply, self._dp_ranks, drafts=self._drafts)
        match happened:
            case Untouched(reason) if again:  # untouched since the first try, which has written
                return _tainted(f"its cache was not flushed, and then {reason}", watch)
            case Untouched(reason, led=True):
                # What it holds is the leader's business: it is not left paused, whatever is known of it here.
                with watch.during(Stage.RESUME):
                    resumed = await self._resume_after_refit()
                timings = watch.milliseconds
                return Refit(outcome=Outcome.NACK, resumed=resumed, reason=reason, led=True, timings=timings)
            case Untouched(reason, vouched=True, needs_full=needs_full):
                needs_full = target.in_place and needs_full
                return await self._as_before(reason, None, target, watch, needs_full=needs_full)
            case Untouched(reason, reachable):
                return await self._untouched(reason, before, target, watch, reachable=reachable)
            case Unclear(reason):
                return _tainted(reason, watch)
            case NotFlushed(reason) if again:
                return _tainted(reason, watch)
            case NotFlushed():
                # Something else has paused it in place since: requests hold on to what the old weights computed.
                await calls.pause(self._http, "retract", drains=False)
                return await self._load(target, before, watch, again=True)
            case Loaded(version, found, how):
                self._plugin.was_loaded(how)
                wanted = target.offered or target.files
                if version is not None and wanted is not None and version != wanted.version:
                    return _tainted(f"it says that it serves {version}, not {wanted.version}", watch)
                return await self._verify(target, found, watch)
            case _:
                assert_never(happened)

    async def _verify(self, target: Target, found: str | None, watch: Stopwatch) -> Refit:
        """Verify a load. `found` is the fingerprint in the plugin's answer; then path and label were set as well."""
        with watch.during(Stage.VERIFY):
            (info, contents), unchanged = await asyncio.gather(self._said(target, found), target.unchanged())
        if isinstance(info, str):
            return _tainted(f"loaded, but cannot be verified: {info}", watch)
        if isinstance(contents, NoReply):
            return _tainted(f"loaded, but its tensors cannot be verified: {contents.reason}", watch)
        says = Says(model_path=info.model_path, weight_version=info.weight_version, fingerprint=contents)
        reason = doubt(says, target, unchanged=unchanged)
        if reason is not None:
            # A load of ours that fails leaves the old name or the new one.
            names = {target.path, None if self._last is None else self._last.model_path, self._startup_path}
            given = contents if reason == OTHER_TENSORS else None
            tainted = _tainted(f"loaded, but {reason}", watch)
            return replace(tainted, overwritten=info.model_path not in names, fingerprint=given)
        self._last = info
        with watch.during(Stage.RESUME):
            resumed = await self._resume_after_refit()
        return Refit(outcome=Outcome.ACK, resumed=resumed, fingerprint=contents, timings=watch.milliseconds)

    async def _said(self, target: Target, found: str | None) -> tuple[ModelInfo | str, str | NoReply | None]:
        """What it serves, and the fingerprint. One request set path and label with what the plugin answered for."""
        if (kept := await clear(self._http, self._stores)) is not None:
            return kept.reason if isinstance(kept, NoReply) else kept, None
        if found is not None:
            return ModelInfo(model_path=target.path, weight_version=target.label), found
        reply, contents = await asyncio.gather(self._http.get("/model_info", PROBE_SECONDS), self._contents())
        return read_model_info(reply, self._http.url), contents

    async def _untouched(
        self, reason: str, before: str | None, target: Target, watch: Stopwatch, *, reachable: bool
    ) -> Refit:
        """It says that nothing was written. Believe it where the contents prove it, or cannot be compared."""
        if not reachable:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=reason, timings=watch.milliseconds)
        with watch.during(Stage.VERIFY):
            after = await self._contents()
        if isinstance(after, NoReply) or after != before:
            proof = after.reason if isinstance(after, NoReply) else "its tensors are not what they were"
            reason = f"{reason}; and {proof}"
            return _tainted(reason, watch)
        return await self._as_before(reason, after, target, watch)


def _tainted(reason: str, watch: Stopwatch) -> Refit:
    return Refit(outcome=Outcome.TAINTED, resumed=False, reason=reason, timings=watch.milliseconds)


def _order(target: Target) -> dict[str, Any]:
    """The update call. `load_format` is explicit: a server that was started with dummy weights would load dummies."""
    return {
        "model_path": target.path,
        "load_format": "auto",
        "weight_version": target.label,
        "flush_cache": True,
        "abort_all_requests": False,
        "torch_empty_cache": False,
    }
