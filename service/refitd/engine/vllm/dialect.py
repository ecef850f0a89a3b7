"""vLLM's dialect, with refitd's extension in the server or without. `info`, `loads` and `contents` decide, this acts.

With the extension a load is `refitd_update` on every worker, whose answers say what the engine holds: nothing is
restored or proved from here, and several processes are no danger, since a method of the extension never raises. No call
carries vLLM's own `timeout`: one that expires kills the engine.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from refitd.engine.fingerprints import BY_PLUGIN
from refitd.engine.http import (
    CALL_SECONDS,
    MAX_BODY_BYTES,
    PROBE_SECONDS,
    CallFailure,
    Key,
    NoReply,
    Reply,
    Transport,
)
from refitd.engine.plugin import EnginePlugin
from refitd.engine.port import DRAFT_LEFT, UNNAMED, ChangeCheck, Obstacle, Process, Reached, Target, Unreached
from refitd.engine.replies import Failed, Loading, Unclear, Untouched, meaning_of_check, way_in
from refitd.engine.transaction import Before, Shown
from refitd.engine.vllm import contents
from refitd.engine.vllm.contents import (
    CALL,
    CONTROL,
    Digests,
    ProcessLoads,
    digests_of,
    fingerprint,
    fingerprint_of,
    not_opened,
    results,
    what_happened,
)
from refitd.engine.vllm.info import (
    CHECKER,
    LORA,
    NEEDED,
    NEVER_LABELLED,
    SLEEP,
    WAKE,
    WORDS,
    Capabilities,
    Label,
    VllmServerInfo,
    is_dead,
    is_extended,
    missing,
    obstacles,
    read_label,
    read_release,
    read_server_info,
    stock_reason,
)

PAUSE_MODES = ("keep", "wait", "abort")
"""What a server does with requests in flight, the best first. It survives a load with each of them."""
RESET_EVERY_SECONDS = 0.05
LOOK_EVERY_SECONDS = 1.0
HEALTH_SECONDS = 5.0
REFUSALS = 3  # of connections, one after the other, until the server counts as ended


class VllmDialect:
    """One vLLM server. See `Dialect`.

    /weight_info goes through the process that loads.
    """

    settles_by = "/weight_info"
    plugin_minds_all = False
    each_rank_answers = True

    def __init__(self, http: Transport, *, pause_mode: str = "auto", opens: str | None = None) -> None:
        """Make no call yet. `pause_mode`: for requests in flight while it loads: "wait" has them end, "abort" ends
        them, others keep them. `opens`: the root as the server sees it, with which the channel of the extension is
        opened; None for commands that look at the server, and open nothing.
        """
        self.http = http
        self._mode = pause_mode if pause_mode in PAUSE_MODES else PAUSE_MODES[0]
        self._opens = opens
        self._asked_to_open: Process | None = None  # the process of the server that was asked to open the channel
        self._not_opened: str | None = None  # why it has not, as far as it was asked
        self._server: VllmServerInfo | None = None
        self._last: Target | None = None  # what it serves, as far as it is known
        self._labelled: str | None = None  # what the server was labelled right before the last pause
        self._loads = ProcessLoads(http)
        self._was_away = True  # whether another process may answer than at the last probe

    @property
    def is_known(self) -> bool:
        return self._server is not None and self._last is not None

    @property
    def lost(self) -> str | None:
        return self._loads.lost

    @property
    def _can(self) -> Capabilities:
        return Capabilities() if self._server is None else self._server.capabilities

    async def probe(self) -> Reached | Unreached:
        """See `Dialect`. Asks how the server was started only when it may be another process than before.

        The process that generates answers for the label, so a server that loads does not answer before it has.
        """
        reply = await self.http.get("/weight_info", PROBE_SECONDS)
        label = read_label(reply, self.http.url)
        no_route = isinstance(reply, Reply) and reply.has_no_route
        if isinstance(label, str) and not no_route:
            self._was_away = True
            return unreached(label, reply)
        served = "" if isinstance(label, str) else label.weight_version
        is_new = self._was_away or self._last is None or served != self._last.label
        if is_new and (fault := await self._look(served)) is not None:
            return unreached(fault, reply)
        if self._server is None or self._last is None or isinstance(label, str):
            return Unreached(reason=label if isinstance(label, str) else f"{self.http.url} was not recognised")
        return Reached(
            model_path=self._last.path,
            weight_version=served,
            server_version=self._server.version,
            configuration=self._server.configuration,
            startup_path=self._server.model_path,
            process=self._server.process,
            address=reply.address if isinstance(reply, Reply) else None,
            server="vLLM",
            draft=DRAFT_LEFT if self._can.draft else None,
        )

    async def _look(self, label: str) -> Obstacle | str | None:
        """Learn how the server was started; what it lacks or why that cannot be said, None where it was."""
        server = await ask_how_started(self.http)
        if not isinstance(server, VllmServerInfo):
            return server
        if self._server is not None and server.process != self._server.process:
            self._loads = ProcessLoads(self.http)
        self._server, self._was_away = server, False
        if self._last is None or self._last.label != label:
            path = server.model_path if label == NEVER_LABELLED else UNNAMED
            self._last = Target(path=path, label=label)
        return None

    async def find_plugin(self, plugin: EnginePlugin) -> None:
        """See `Dialect`. Has the channel of the extension opened where it is not open: once for each process.

        A server that was started with `--worker-extension-cls refitd_vllm.Worker`, and in whose processes no plugin of
        vLLM runs, has no channel until each of its workers was asked to open one. A worker knows neither the number by
        which its server names itself, where it draws another one after the start, nor the root, where no variable says
        it. The service knows both.
        """
        if (server := self._server) is None:
            return
        await plugin.look(server.launch)
        is_asked = self._opens is None or not is_extended(self._can) or server.process == self._asked_to_open
        if plugin.seen.release is not None or is_asked or self._can.replicas > 1:
            return
        known = {"instance": server.process.started or "", "root": self._opens}
        reply = await self.http.post(CALL, {"method": "refitd_open", "kwargs": known}, CALL_SECONDS)
        never_sent = isinstance(reply, NoReply) and reply.lost is CallFailure.NEVER_SENT
        self._asked_to_open = None if never_sent else server.process
        fault = not_opened(reply, self._can.ranks)
        self._not_opened = fault.reason if isinstance(fault, Unclear) else fault
        await plugin.look(server.launch, anew=True)
        if isinstance(fault, Unclear) and self._can.ranks > 1:
            self._loads.lost = fault.reason

    def stock_reason(self, found: str | None) -> str | None:
        return stock_reason(self._can, found, self._not_opened, opens=self._opens is not None)

    def obstacles(self, *, plugged: bool) -> Iterator[Obstacle]:
        return obstacles(self._can, plugged=plugged)

    async def left_alone(self) -> str | None:
        return await asleep(self.http) if self._can.sleeps else None

    async def hold(
        self, target: Target, pausing: AbstractContextManager[None], within: float, *, plugged: bool
    ) -> Before | NoReply | str:
        """See `Dialect`. It generates nothing more when the server says so: /is_paused says so before."""
        before = Before() if plugged else Before(again=await self._served_before(target))
        label = read_label(await self.http.get("/weight_info", CALL_SECONDS), self.http.url)
        self._labelled = label.weight_version if isinstance(label, Label) else None
        with pausing:
            fault = await self._pause(self._mode_for(target), within)
        return before if fault is None else fault

    async def _served_before(self, target: Target) -> Target | None:
        """What can be loaded and proved again when the load fails; None where that is not known."""
        last = self._last
        if target.repairs or last is None or last.path == UNNAMED:
            return None
        recorded = last.fingerprint or target.not_fingerprint
        if recorded is None or recorded.startswith(BY_PLUGIN):
            recorded = await fingerprint_of(self.http, None, checker=self._can.checker)
        return None if recorded is None else replace(last, fingerprint=recorded)

    def _mode_for(self, target: Target) -> str:
        # The same step of another run has the same label: no answer may continue through such a load, since its parts
        # could not be told apart afterwards.
        renewed = self._last is not None and self._last.label == target.label and self._last.path != target.path
        return "abort" if renewed else self._mode

    async def _pause(self, mode: str, within: float) -> NoReply | str | None:
        """Have it generate nothing; why that was not done, None where it says that nothing is computed any more."""
        at_once = self._can.pauses_at_once
        path = f"{SLEEP}?level=0&mode={mode}" if at_once else f"/pause?mode={mode}"
        reply = await self.http.post(path, {}, within if mode == "wait" else CALL_SECONDS)
        if _is_done(reply, "status", "sleeping" if at_once else "paused"):
            return None
        if isinstance(reply, NoReply):
            return reply
        happened = what_happened(reply, self._can.ranks)
        if isinstance(happened, Untouched | Unclear):
            return happened.reason
        fault = f"cannot be paused: {reply.short_message}"
        if self._can.ranks > 1 and isinstance(happened, Failed):  # mostly the answer to a call that failed before
            self._loads.lost = f"{fault}; its processes may answer other calls than they are asked: restart it"
        return fault

    async def load(self, target: Target, within: float, *, plugged: bool) -> Loading:
        if plugged:
            return await self._loads.by_extension(target.path, self._can.ranks, within)
        return await self._loads.load(target.path, within, torn=target.repairs)

    async def untouched(self, before: Before) -> Shown:
        """See `Dialect`. It refuses before any process of its hears of the load."""
        return Shown()

    async def verify(self, target: Target, answered: str | None) -> Shown:
        """See `Dialect`. Where its digests do not cover all parameters a fixed prompt is scored, for which it has to
        run.
        """
        stale = await self._freshen(target.label)
        if stale.fault is not None or answered is not None:
            return replace(stale, fingerprint=answered)
        digests = await digests_of(self.http, checker=self._can.checker)
        if isinstance(digests, NoReply):
            return Shown(fault=f"its parameters cannot be verified: {digests.reason}")
        # While they were computed another program may have labelled what it has loaded: they are of that.
        named = Shown() if digests is None else await self._labelled_as(target.label)
        if (found := fingerprint(digests, None)) is not None or named.fault is not None:
            return replace(named, fingerprint=found)
        return Shown(once_resumed=partial(self._answered, target, digests))

    async def _answered(self, target: Target, digests: Digests | None) -> Shown:
        found, fault = await contents.answered(self.http, digests, target)
        named = await self._labelled_as(target.label)
        shown = Shown(fingerprint=found, fault=fault) if fault is not None or not named.overwritten else named
        if shown.fault is not None:
            await self._pause("keep", CALL_SECONDS)
        return shown

    async def _freshen(self, label: str) -> Shown:
        """Empty what other weights have computed, and set the label; why that did not go well is the fault."""
        # Another label than before the load says that another program has loaded something since.
        named = await self._labelled_as(self._labelled)
        if named.fault is not None:
            return named
        # At once: nothing is computed in the pause, so the order in which the server takes them does not matter.
        held_back, reply = await asyncio.gather(
            empty_caches(self.http, multimodal=self._can.multimodal),
            self.http.post("/update_weight_version", {"new_version": label}, CALL_SECONDS),
        )
        if held_back is not None:
            return Shown(fault=held_back)
        if not _is_done(reply, "new_version", label):
            return Shown(fault=f"its label was not set: {_why(reply)}")
        named, paused = await asyncio.gather(self._labelled_as(label), self.http.get("/is_paused", CALL_SECONDS))
        # A server that was restarted since the load would have its start-up weights under this label.
        if named.fault is not None or _is_done(paused, "is_paused", True):
            return named
        fault = "it is not paused any more: it was restarted, or another program has resumed it, during the update"
        return Shown(fault=fault)

    async def _labelled_as(self, label: str | None) -> Shown:
        """Whether it has the label that it had or was given. No call sets one on a condition, so it is looked at."""
        named = read_label(await self.http.get("/weight_info", CALL_SECONDS), self.http.url)
        if isinstance(named, str):
            return Shown(fault=named)
        now = named.weight_version
        if now == label:
            return Shown()
        if now == NEVER_LABELLED:
            return Shown(fault=f"its label {label!r} is gone: it was restarted since the load began")
        return Shown(fault=f"another program has labelled it {now!r}, and not {label!r}", overwritten=True)

    def serves(self, target: Target, fingerprint: str | None) -> None:
        self._last = Target(path=target.path, label=target.label, fingerprint=fingerprint, unchanged=target.unchanged)

    async def contents(self, alike: str | None) -> str | None:
        return await fingerprint_of(self.http, alike, checker=self._can.checker)

    async def trial(self, label: str) -> str | None:
        return await contents.trial_fault(self.http, label)

    async def resume(self) -> bool:
        if not self._can.pauses_at_once:
            return _is_done(await self.http.post("/resume", {}, CALL_SECONDS), "status", "resumed")
        # Not /resume: vLLM's metrics would call it asleep from then on.
        return _is_done(await self.http.post(f"{WAKE}?tags=scheduling", {}, CALL_SECONDS), "status", "awake")

    async def check_changes(self) -> ChangeCheck:
        return await check_changes(self.http)


class WatchedTransport(Transport):
    """A `Transport` that gives up a call that nothing will answer. While a long call is open, it looks each second.

    vLLM never answers calls that come while its engine dies, and its server waits for them for ever. /health answers on
    another connection, without the engine: 503 with an empty body once the engine is dead. At most five seconds later
    the server takes no connections any more. A 503 with a body is a proxy's, and says nothing of the engine. Nor does a
    server that refuses one connection: a proxy before it may be starting again. SGLang (0.5.23) needs no watch: it ends
    by itself when its scheduler dies, which breaks off its calls.
    """

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, key: Key, within: float, most: int = MAX_BODY_BYTES
    ) -> Reply | NoReply:
        if within <= HEALTH_SECONDS:  # as a probe, which may ask a server of another kind
            return await super()._call(method, path, body, key, within, most)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(super()._call(method, path, body, key, within, most))
            end = tasks.create_task(self._end())
            await asyncio.wait({call, end}, return_when=asyncio.FIRST_COMPLETED)
            call.cancel()
            end.cancel()
        return end.result() if call.cancelled() else call.result()

    async def _end(self) -> NoReply:
        """Wait until the engine is dead or the server has ended."""
        refused = 0
        while refused < REFUSALS:
            await asyncio.sleep(LOOK_EVERY_SECONDS)
            seen = await super()._call("GET", "/health", None, self._read, HEALTH_SECONDS)
            if isinstance(seen, Reply) and seen.status == 503 and not seen.text:
                return NoReply(CallFailure.DIED, "its engine has died: restart it")
            refused = refused + 1 if isinstance(seen, NoReply) and seen.nothing_listens else 0
        return NoReply(CallFailure.NO_ANSWER, f"{self.url} takes no connections any more, with a call open")


async def ask_how_started(http: Transport) -> VllmServerInfo | Obstacle | str:
    routes = (*NEEDED, CHECKER, LORA, SLEEP, WAKE)
    version, info, *found = await asyncio.gather(
        http.get("/version", CALL_SECONDS),
        http.get("/server_info?config_format=json", CALL_SECONDS),
        *(http.get(route, CALL_SECONDS) for route in routes),
    )
    release = read_release(version, http.url)
    if isinstance(release, str):
        return release
    exists = {route: isinstance(each, Reply) and each.status != 404 for route, each in zip(routes, found, strict=True)}
    if (fault := missing(release.version, exists, http.url)) is not None:
        return fault
    return read_server_info(release.version, info, exists, http.url)


def unreached(fault: Obstacle | str, read: Reply | NoReply) -> Unreached:
    """What a probe says of a server that lacks something, or cannot be driven. `fault`: what it lacks, or why nothing
    can be said. `read`: its answer to /weight_info.
    """
    if isinstance(fault, Obstacle):
        return Unreached(reason=fault.text, advice=fault.fix, recognised=True)
    if isinstance(read, Reply) and is_dead(read):
        return Unreached(reason=fault, advice="restart it: its log says of what its engine has died", recognised=True)
    is_vllm = isinstance(read, Reply) and isinstance(read_label(read, ""), Label)
    return Unreached(reason=fault, advice=way_in(read, WORDS), recognised=is_vllm, nothing_listens=read.nothing_listens)


async def check_changes(http: Transport) -> ChangeCheck:
    """Find out whether changes get in, by a method of the workers that changes nothing.

    vLLM asks for its key at /v1 alone, so its routes for weights are open to everybody who reaches them, unless a proxy
    stands before them. With VLLM_SERVER_DEV_MODE=1 its log has a traceback of each call that it refuses as incomplete.
    """
    reply = await http.post(CALL, {"method": CONTROL}, PROBE_SECONDS)
    opens = isinstance(reply, Reply) and reply.ok and results(reply) is not None
    return meaning_of_check(reply, WORDS, f"a call ({CALL}) that changes nothing", opens=opens)


async def asleep(http: Transport) -> str | None:
    """Why an engine that can sleep is left alone: one that is resumed while it sleeps runs without its weights."""
    if _is_done(await http.get("/is_sleeping", PROBE_SECONDS), "is_sleeping", False):
        return None
    return "it is asleep, or paused by another: it is updated once it was woken up (POST /wake_up) or resumed"


async def empty_caches(http: Transport, *, multimodal: bool) -> str | None:
    """Empty what other weights have computed, with requests running; why that did not go well, None where it did.

    `multimodal`: whether the server keeps what its encoders computed.
    """
    path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    try:
        async with asyncio.timeout(CALL_SECONDS):
            while not _is_done(reply := await http.post(path, {}, CALL_SECONDS), "success", True):
                if not isinstance(reply, Reply) or not reply.ok:
                    return f"its cache was not emptied of what other weights have computed: {_why(reply)}"
                await asyncio.sleep(RESET_EVERY_SECONDS)  # blocks are still on their way to another store
    except TimeoutError:
        return f"its cache still holds what other weights have computed, {CALL_SECONDS:g} s after the load"
    for path in ("/reset_mm_cache", "/reset_encoder_cache") if multimodal else ():
        reply = await http.post(path, {}, CALL_SECONDS)
        if not isinstance(reply, Reply) or not reply.ok:
            return f"{path} did not go well: {_why(reply)}"
    return None


def _is_done(reply: Reply | NoReply, key: str, value: object) -> bool:
    """Whether the server confirms that it carried out the call, which a proxy's page with a 200 does not."""
    return isinstance(reply, Reply) and reply.ok and (reply.data or {}).get(key) == value


def _why(reply: Reply | NoReply) -> str:
    return reply.reason if isinstance(reply, NoReply) else f"{reply.status}: {reply.short_message}"
