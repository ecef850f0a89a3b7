"""The adapter to vLLM, with refitd's extension inside or without. `reply` and `contents` decide, this acts.

The transaction of one refit, and what is sent when it breaks off:

    settle    a load whose end is not known may still run: wait for it, send nothing beside it
    prepare   where the engine has refitd's extension: it checks the version while it serves; refused → no pause
    pause     `keep`: requests stay where they are. It is complete when the server says so: /is_paused says so before.
              Broke off → resume, contents are known
    load      every process of the server reads the checkpoint; failed → what it served before is loaded again in the
              same pause and proved (NACK), else nothing is sent: the engine stays paused, its contents are unknown.
              What a load that failed has read goes into the next one, which fails of it or answers 200 all the same:
              after a failure one that succeeds is followed by another
    verify    caches emptied and the label set, at once, digests compared; doubt → the engine stays paused, its contents
              are unknown
    resume    lost → reported in the result, and the reconciler tries again
    answers   only where its digests do not cover all parameters: a fixed prompt is scored, for which it has to run.
              Doubt → it is paused again, its contents are unknown

With the extension a load is `refitd_update` on every worker, whose answers say what the engine holds: nothing is
restored or proved from here, and several processes are no danger, since a method of the extension never raises.

No call carries vLLM's own `timeout`: one that expires kills the engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from refitd.engine.dialing import Guard
from refitd.engine.fingerprints import BY_PLUGIN
from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.limits import CALL_SECONDS, PROBE_SECONDS
from refitd.engine.load_reply import Loaded, Unclear, Untouched
from refitd.engine.plugin.answers import fingerprint as answered_fingerprint
from refitd.engine.plugin.channels import SocketList
from refitd.engine.plugin.client import PluginClient
from refitd.engine.plugin.leading import Leads
from refitd.engine.plugin.prepared import PrepareRefused
from refitd.engine.port import (
    DRAFT_LEFT,
    UNNAMED,
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
from refitd.engine.vllm import access, calls, proof
from refitd.engine.vllm.contents import fingerprint
from refitd.engine.vllm.extension import ExtensionChannel
from refitd.engine.vllm.info import NEVER_LABELLED, Capabilities, VllmServerInfo, read_label, said
from refitd.engine.vllm.loads import LoadedBefore, ProcessLoads
from refitd.engine.vllm.obstacles import obstacles, stock_reason
from refitd.engine.vllm.reply import Failed, refusal, said_by_extension, what_happened
from refitd.engine.vllm.watched import WatchedTransport

PAUSE_MODES = ("keep", "wait", "abort")
"""What a server does with requests in flight, the best first. It survives a load with each of them."""


class VllmEngine:
    """One vLLM server behind the `Engine` port."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | Path | None = None,
        admin_key: str | Path | None = None,
        pause_mode: str = "auto",
        load_timeout: float = 600.0,
        guard: Guard | None = None,
        several_ranks: bool = False,
        root: Path | None = None,
        root_there: str | None = None,
        allow_dtype_cast: bool = False,
        leads: Leads | None = None,
        sockets: SocketList | None = None,
    ) -> None:
        """Make no call yet.

        Args:
            url: of the server.
            api_key: opens reads, as for `Transport`.
            admin_key: opens changes, as for `Transport`.
            pause_mode: for requests in flight while it loads: "wait" has them end, "abort" ends them, others keep them.
            load_timeout: seconds that a load may take.
            guard: says which addresses may be called.
            several_ranks: whether a server without the extension whose weights several processes hold is updated.
            root: where the extension's sockets are, as the service sees it.
            root_there: the same as the server sees it; None where it sees it so, too.
            allow_dtype_cast: whether the engine may cast tensors to its own dtype.
            leads: the lease that the service asks the extension for; None for a reader that leads no engine.
            sockets: of the root, listed once for all servers.
        """
        self._http = WatchedTransport(url, api_key=api_key, admin_key=admin_key, guard=guard)
        self._mode = pause_mode if pause_mode in PAUSE_MODES else PAUSE_MODES[0]
        self._load_timeout = load_timeout
        self._several_ranks = several_ranks
        self._plugin = PluginClient(root, allow_dtype_cast=allow_dtype_cast, leads=leads, sockets=sockets)
        opens = root is not None and leads is not None
        self._channel = ExtensionChannel(self._http, root_there or str(root), opens=opens)
        self._server: VllmServerInfo | None = None
        self._last: LoadedBefore | None = None
        self._labelled: str | None = None  # what the server was labelled right before the last pause
        self._loads = ProcessLoads(self._http, load_timeout)
        self._was_away = True  # whether another process may answer than at the last probe

    async def aclose(self) -> None:
        """See `Engine`. No connection is kept from one call to the next."""
        await self._plugin.forget()

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. Asks how the server was started only when it may be another process than before.

        The process that generates answers for the label, so a server that loads does not answer before it has.
        """
        reply = await self._http.get("/weight_info", PROBE_SECONDS)
        label = read_label(reply, self._http.url)
        no_route = isinstance(reply, Reply) and reply.status in {404, 405}
        if isinstance(label, str) and not no_route:
            self._was_away = True
            return access.unreached(label, reply)
        served = "" if isinstance(label, str) else label.weight_version
        is_new = self._was_away or self._last is None or served != self._last.label
        if is_new and (fault := await self._look(served)) is not None:
            return access.unreached(fault, reply)
        if self._server is None or self._last is None or isinstance(label, str):
            return Unreached(reason=label if isinstance(label, str) else f"{self._http.url} was not recognised")
        self._loads.lost = await self._channel.find(self._plugin, self._server) or self._loads.lost
        plugged = self._plugin.release is not None
        return Reached(
            model_path=self._last.path,
            weight_version=served,
            server_version=self._server.version,
            # What the extension computes and what vLLM does cannot be compared: each has records of its own.
            configuration=self._server.configuration + (" refitd" if plugged else ""),
            startup_path=self._server.model_path,
            plugin=self._plugin.release,
            takes_offers=self._plugin.takes_offers,
            receivers=self._plugin.receivers,
            proves=self._plugin.proves,
            stock_reason=stock_reason(self._can, self._plugin.reason, self._channel.fault, opens=self._channel.opens),
            process=self._server.process,
            address=reply.address if isinstance(reply, Reply) else None,
            led_by=self._plugin.led_by,
            loader=self._plugin.loader,
            server="vLLM",
            draft=DRAFT_LEFT if self._can.draft else None,
            obstacles=tuple(obstacles(self._can, plugged=plugged, several_ranks=self._several_ranks)),
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        watch = Stopwatch(on_stage)
        if (self._server is None or self._last is None) and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        if (fault := await self._loads.settle()) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=fault)
        if (lost := self._loads.lost) is not None:
            return _tainted(lost, watch)
        if not target.repairs and self._can.sleeps and (asleep := await access.asleep(self._http)) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=asleep)
        plugged = self._plugin.vouches_for(target)
        reason = refusal(self._can, target, plugged=plugged, several_ranks=self._several_ranks)
        if reason is not None:
            return await self._as_before(reason, target, watch, needs_full=target.in_place)
        with watch.during(Stage.PREPARE) if plugged else nullcontext():
            prepared = await self._plugin.prepare_for(target, self._load_timeout) if plugged else None
        if isinstance(prepared, PrepareRefused):
            needs_full = target.in_place and prepared.needs_full
            return await self._as_before(prepared.reason, target, watch, needs_full=needs_full)
        return await self._paused_refit(target, watch, plugged=plugged)

    async def _paused_refit(self, target: Target, watch: Stopwatch, *, plugged: bool) -> Refit:
        before = None if plugged else await self._before(target)
        try:
            self._labelled = await calls.label_of(self._http)
            with watch.during(Stage.PAUSE):
                fault = await self._pause(self._mode_for(target))
                if fault is None and self._can.ranks > 1 and not plugged:
                    fault = await self._loads.aligned(self._can.ranks)
        except asyncio.CancelledError:
            if not target.repairs:
                await asyncio.shield(self.resume())  # no load was sent: its contents are known
            await asyncio.shield(self._plugin.forget())
            raise
        if (lost := self._loads.lost) is not None:  # what it generates is mixed up like its answers
            return _tainted(lost, watch)
        if fault is not None:
            back = await self._back(fault, target, watch)
            await self._plugin.forget()
            return back
        return await (self._transact(target, watch) if plugged else self._load(target, before, watch))

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `Engine`. A server without the extension can prepare nothing."""
        return await self._plugin.prefetch(version)

    async def cancel_prefetch(self) -> None:
        await self._plugin.forget()

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `Engine`. `alike` itself where the contents agree with it: scores are never equal to the last digit."""
        if self._server is None and isinstance(await self.probe(), Unreached):
            return None
        if self._plugin.release is not None and (alike is None or alike.startswith(BY_PLUGIN)):
            return answered_fingerprint(await self._plugin.contents(of_all=True))
        return await proof.fingerprint_of(self._http, alike, checker=self._can.checker)

    async def trial(self, label: str) -> str | None:
        return await proof.tried(self._http, label)

    async def resume(self) -> bool:
        return await calls.resume(self._http, at_once=self._can.pauses_at_once)

    async def check_changes(self) -> ChangeCheck:
        return await access.check_changes(self._http)

    @property
    def _can(self) -> Capabilities:
        return Capabilities() if self._server is None else self._server.capabilities

    async def _look(self, label: str) -> Obstacle | str | None:
        """Learn how the server was started; what it lacks or why that cannot be said, None where it was."""
        server = await calls.ask_how_started(self._http)
        if not isinstance(server, VllmServerInfo):
            return server
        if self._server is not None and server.process != self._server.process:
            self._loads = ProcessLoads(self._http, self._load_timeout)
        self._server, self._was_away = server, False
        if self._last is None or self._last.label != label:
            path = server.model_path if label == NEVER_LABELLED else UNNAMED
            self._last = LoadedBefore(path=path, label=label)
        return None

    async def _before(self, target: Target) -> LoadedBefore | None:
        """What can be loaded and proved again when the load fails; None where that is not known."""
        last = self._last
        if target.repairs or last is None or last.path == UNNAMED or self._can.ranks > 1:
            return None
        recorded = last.fingerprint or target.not_fingerprint
        if recorded is None or recorded.startswith(BY_PLUGIN):
            recorded = await proof.fingerprint_of(self._http, None, checker=self._can.checker)
        return None if recorded is None else replace(last, fingerprint=recorded)

    def _mode_for(self, target: Target) -> str:
        # The same step of another run has the same label: no answer may continue through such a load, since its parts
        # could not be told apart afterwards.
        renewed = self._last is not None and self._last.label == target.label and self._last.path != target.path
        return "abort" if renewed else self._mode

    async def _pause(self, mode: str) -> NoReply | str | None:
        within = self._load_timeout if mode == "wait" else CALL_SECONDS
        reply = await calls.pause(self._http, mode, within, at_once=self._can.pauses_at_once)
        if not isinstance(reply, Reply):
            return reply
        happened = what_happened(reply, self._can.ranks)
        if isinstance(happened, Untouched | Unclear):
            return happened.reason
        fault = f"cannot be paused: {said(reply)}"
        if self._can.ranks > 1 and isinstance(happened, Failed):  # mostly the answer to a call that failed before
            self._loads.lost = f"{fault}; its processes may answer other calls than they are asked: restart it"
        return fault

    async def _back(self, fault: NoReply | str, target: Target, watch: Stopwatch) -> Refit:
        """The pause broke off: no load was sent, so its contents are as before; if they are known, it is resumed."""
        if isinstance(fault, str):
            return await self._as_before(fault, target, watch)
        resumed = fault.lost is CallFailure.NEVER_SENT
        if not resumed and not target.repairs:
            with watch.during(Stage.RESUME):
                resumed = await asyncio.shield(self.resume())
        return Refit(outcome=Outcome.UNREACHABLE, resumed=resumed, reason=fault.reason, timings=watch.milliseconds)

    async def _as_before(self, reason: str, target: Target, watch: Stopwatch, *, needs_full: bool = False) -> Refit:
        """Nothing was written, and its contents are as before: it is resumed, unless they are unknown."""
        if target.repairs:
            return _tainted(reason, watch)
        return await self._refused(reason, watch, needs_full=needs_full)

    async def _refused(self, reason: str, watch: Stopwatch, *, needs_full: bool = False, led: bool = False) -> Refit:
        with watch.during(Stage.RESUME):
            resumed = await asyncio.shield(self.resume())
        ms = watch.milliseconds
        return Refit(outcome=Outcome.NACK, resumed=resumed, reason=reason, needs_full=needs_full, led=led, timings=ms)

    async def _transact(self, target: Target, watch: Stopwatch) -> Refit:
        """Have the extension carry out the load; its answers say what the engine holds."""
        with watch.during(Stage.LOAD):
            reply = await self._loads.by_extension(target.path)
        self._plugin.is_done()
        match said_by_extension(reply, self._can.ranks):
            case Loaded(version, found, how):
                self._plugin.was_loaded(how)
                wanted = target.offered or target.files
                if wanted is not None and version != wanted.version:
                    return _tainted(f"it says that it serves {version}, not {wanted.version}", watch)
                return await self._prove(target, watch, found)
            case Untouched(reason, led=True):
                # What it holds is the leader's business: it is not left paused, whatever is known of it here.
                return await self._refused(reason, watch, led=True)
            case Untouched(reason, reachable=True, needs_full=needs_full):
                return await self._as_before(reason, target, watch, needs_full=target.in_place and needs_full)
            case Untouched(reason):
                return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=reason, timings=watch.milliseconds)
            case Failed(reason) | Unclear(reason):
                return _tainted(reason, watch)

    async def _load(self, target: Target, before: LoadedBefore | None, watch: Stopwatch) -> Refit:
        with watch.during(Stage.LOAD):
            happened = await self._loads.load(target.path, self._can.ranks, torn=target.repairs)
        match happened:
            case Loaded():
                return await self._prove(target, watch)
            case Untouched(reason, reachable=True):
                return await self._as_before(reason, target, watch)
            case Untouched(reason):
                return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=reason, timings=watch.milliseconds)
            case Failed(reason):
                return await self._restore(reason, before, watch)
            case Unclear(reason):
                return _tainted(reason, watch)

    async def _restore(self, reason: str, before: LoadedBefore | None, watch: Stopwatch) -> Refit:
        """Load what it served before, while no request runs: the next one would end the engine."""
        if before is None:
            return _tainted(f"{reason}; its weights are lost: where the next load fails as well, restart it", watch)
        again = Target(path=before.path, label=before.label, fingerprint=before.fingerprint, unchanged=before.unchanged)
        if not await again.unchanged():
            return _tainted(
                f"{reason}; and the files of what it served before are no longer those that were checked", watch
            )
        with watch.during(Stage.LOAD):
            happened = await self._loads.load(again.path, self._can.ranks)
        if not isinstance(happened, Loaded):
            return _tainted(f"{reason}; nor does it load what it served before ({happened.reason}): restart it", watch)
        back = await self._prove(again, watch)
        if back.outcome is not Outcome.ACK:
            return replace(back, reason=f"{reason}; and what it served before is not back: {back.reason}")
        return replace(back, outcome=Outcome.NACK, reason=f"{reason}; what it served before is back")

    async def _prove(self, target: Target, watch: Stopwatch, answered: str | None = None) -> Refit:
        """Bring label and caches to what was loaded, prove it as far as the server can, and resume.

        Args:
            target: what was loaded.
            watch: counts the time.
            answered: the fingerprint in the extension's answers, which is proof.
        """
        with watch.during(Stage.VERIFY):
            fresh = calls.freshen(self._http, target.label, self._labelled, multimodal=self._can.multimodal)
            doubt, unchanged = await asyncio.gather(fresh, target.unchanged())
            digests = None if answered is not None else await proof.digests_of(self._http, checker=self._can.checker)
        if isinstance(digests, NoReply):
            return _tainted(f"loaded, but its parameters cannot be verified: {digests.reason}", watch)
        found = answered or fingerprint(digests, None)
        doubt = doubt or proof.doubt(found, target, unchanged=unchanged)
        if doubt is None and digests is not None:
            # While they were computed another program may have labelled what it has loaded: they are of that.
            doubt = await calls.relabelled(self._http, target.label)
        if doubt is not None:
            return replace(_doubted(doubt, watch), fingerprint=found if doubt == proof.OTHER_PARAMETERS else None)
        with watch.during(Stage.RESUME):
            resumed = await asyncio.shield(self.resume())
        if found is None and resumed:
            with watch.during(Stage.VERIFY):
                found, doubt = await proof.answered(self._http, digests, target)
                other = await calls.relabelled(self._http, target.label)
                doubt = doubt or (other if isinstance(other, calls.AnotherWriter) else None)
        if doubt is not None:
            await self._pause("keep")
            return _doubted(doubt, watch)
        self._last = LoadedBefore(path=target.path, label=target.label, fingerprint=found, unchanged=target.unchanged)
        return Refit(outcome=Outcome.ACK, resumed=resumed, fingerprint=found, timings=watch.milliseconds)


def _doubted(doubt: calls.AnotherWriter | str, watch: Stopwatch) -> Refit:
    return replace(_tainted(f"loaded, but {doubt}", watch), overwritten=isinstance(doubt, calls.AnotherWriter))


def _tainted(reason: str, watch: Stopwatch) -> Refit:
    return Refit(outcome=Outcome.TAINTED, resumed=False, reason=reason, timings=watch.milliseconds)
