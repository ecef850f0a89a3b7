"""The transaction that brings one server to a version: the same order for all servers, each in its dialect.

    settle    a load whose end is not known may still run: wait for it, send nothing beside it
    prepare   where the server has refitd's plugin: it checks the version while it serves; refused → nothing was paused
    pause     broke off → resume, contents are known
    load      refused → prove untouched → resume; failed → load what it served before in the same pause, and prove that;
              unclear → nothing: the server stays paused, its contents are unknown
    verify    doubt → nothing, likewise
    resume    lost → reported in the result, and the reconciler tries again
    answers   only of a server that can prove nothing while it is paused. Doubt → it is paused again

With the plugin the answer to the load says what the server holds: no fingerprint is computed before the load or after
it. Servers that are updated together wait for one another between pause and load (`sglang/pair.py`).

`Dialect` is the port to a kind of server: which calls it takes, what its replies mean, and what it can do. A dialect
sends and reads. What comes next `ServerEngine` decides, alike for all servers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, assert_never

from refitd.engine.fingerprints import BY_PLUGIN, alike, by_plugin
from refitd.engine.http import CallFailure, NoReply, Transport
from refitd.engine.plugin import EnginePlugin, PrepareRefused
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
from refitd.engine.replies import Failed, Loaded, Loading, Unclear, Untouched


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is known of a server's contents right before a load.

    Attributes:
        fingerprint: of what it holds, by which a refusal is proved; None where it cannot tell.
        again: what can be loaded and proved again when the load fails; None where that is not known.
    """

    fingerprint: str | None = None
    again: Target | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a server shows of its contents.

    Attributes:
        fingerprint: of what it holds; None where it cannot tell.
        fault: why it does not serve the target, whatever its fingerprint is; None where nothing speaks against it.
        overwritten: the fault shows that another program has loaded or labelled something since.
        once_resumed: asks for the evidence that only a server gives that generates; None where there is none. Where
            it finds a fault it pauses the server again.
    """

    fingerprint: str | None = None
    fault: str | None = None
    overwritten: bool = False
    once_resumed: "Callable[[], Awaitable[Shown]] | None" = None


class Dialect(Protocol):
    """One server, as its kind is spoken to. No call raises for what a server does.

    Attributes:
        http: to the server.
        settles_by: a route that is answered by the loop that loads, so that the answer shows that no load runs.
        plugin_minds_all: whether refitd's plugin in the server has a part also in loads that it does not carry out.
        each_rank_answers: whether each rank answers an update for itself; else the first of each data-parallel one.
    """

    http: Transport
    settles_by: str
    plugin_minds_all: bool
    each_rank_answers: bool

    @property
    def is_known(self) -> bool:
        """Whether a probe has learned how the server was started."""
        ...

    @property
    def lost(self) -> str | None:
        """Why nothing counts any more that this process of the server answers; None where it does."""
        ...

    async def probe(self) -> Reached | Unreached: ...

    async def find_plugin(self, plugin: EnginePlugin) -> None:
        """Find the ranks of refitd's plugin in the server that was probed."""
        ...

    def stock_reason(self, found: str | None) -> str | None:
        """Why its loads are the server's own. `found`: what the search for refitd's ranks says, None for nothing."""
        ...

    def obstacles(self, *, plugged: bool) -> Iterable[Obstacle]:
        """What is in the way of updates, the worst first. `plugged`: refitd's plugin has a part in them."""
        ...

    async def left_alone(self) -> str | None:
        """Why it is not updated now, though it can be; None where it is."""
        ...

    async def hold(
        self, target: Target, pausing: AbstractContextManager[None], within: float, *, plugged: bool
    ) -> Before | NoReply | str:
        """Have it compute nothing, and learn what it holds; or why that did not go well.

        Args:
            pausing: counts the time of the pause.
            within: seconds that requests in flight may take where they are to end.
            plugged: refitd's plugin answers for the load, so that nothing has to be known of the contents.
        """
        ...

    async def load(self, target: Target, within: float, *, plugged: bool) -> Loading:
        """Have it load; what that did. `within` seconds, `plugged` as for `hold`."""
        ...

    async def untouched(self, before: Before) -> Shown:
        """Whether it holds what it held before, after it has refused."""
        ...

    async def verify(self, target: Target, answered: str | None) -> Shown:
        """Bring caches and names to what was loaded, and ask what it holds. `answered`: the fingerprint in the plugin's
        answers, which is proof; None where no plugin has loaded.
        """
        ...

    def serves(self, target: Target, fingerprint: str | None) -> None: ...

    async def contents(self, alike: str | None) -> str | None:
        """The fingerprint by the server's own means, as for `EnginePort.fingerprint`."""
        ...

    async def trial(self, label: str) -> str | None: ...

    async def resume(self) -> bool: ...

    async def check_changes(self) -> ChangeCheck: ...


def refusal(found: Iterable[Obstacle]) -> str | None:
    """Why a server is not updated, in a sentence; None where nothing blocks it."""
    first = next((each for each in found if each.blocks), None)
    return None if first is None else f"{first.text}: {first.fix}"


OTHER_TENSORS = "its tensors are not those that a clean load of this version gave"
Others = Callable[[], Awaitable[str | None]]
"""Waits until all servers are paused that are updated together; why none may load, None where all may."""


class ServerEngine:
    """One server behind the `EnginePort`.

    Attributes:
        dialect: how it is spoken to.
        plugin: refitd's, in the server.
        load_timeout: seconds that a load may take.
        is_unsettled: whether a load was sent whose end is not known.
    """

    def __init__(self, dialect: Dialect, plugin: EnginePlugin, load_timeout: float) -> None:
        self.dialect = dialect
        self.plugin = plugin
        self.load_timeout = load_timeout
        self.is_unsettled = False

    async def aclose(self) -> None:
        """See `EnginePort`. No connection is kept from one call to the next."""
        await self.plugin.forget()

    async def probe(self) -> Reached | Unreached:
        seen = await self.dialect.probe()
        if isinstance(seen, Unreached):
            return seen
        plugin = self.plugin
        await self.dialect.find_plugin(plugin)
        inside = plugin.seen
        plugged = inside.release is not None
        return replace(
            seen,
            # What the plugin computes and what the server does cannot be compared: each has records of its own.
            configuration=seen.configuration + (" refitd" if plugged else ""),
            plugin=inside.release,
            takes_offers=inside.takes_offers,
            receivers=inside.receivers,
            proves=inside.proves,
            stock_reason=self.dialect.stock_reason(inside.reason),
            led_by=inside.led_by,
            loader=inside.loader,
            obstacles=tuple(self.dialect.obstacles(plugged=plugged)),
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None], others: Others | None = None) -> Refit:
        """See `EnginePort`. `others`: it loads together with other servers, and the caller resumes them all."""
        return await _Transaction(self, target, Stopwatch(on_stage), others).run()

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `EnginePort`. A server without the plugin can prepare nothing."""
        return await self.plugin.prefetch(version)

    async def cancel_prefetch(self) -> None:
        await self.plugin.forget()

    async def fingerprint(self, alike: str | None = None) -> str | None:
        if not self.dialect.is_known and isinstance(await self.probe(), Unreached):
            return None
        if self.plugin.seen.release is not None and (alike is None or alike.startswith(BY_PLUGIN)):
            return by_plugin(await self.plugin.contents(of_all=self.dialect.each_rank_answers))
        return await self.dialect.contents(alike)

    async def trial(self, label: str) -> str | None:
        return await self.dialect.trial(label)

    async def resume(self) -> bool:
        return await self.dialect.resume()

    async def check_changes(self) -> ChangeCheck:
        return await self.dialect.check_changes()


class _Transaction:
    """One refit of one server. What ends it is a `Refit`, from whichever step."""

    def __init__(self, engine: ServerEngine, target: Target, watch: Stopwatch, others: Others | None) -> None:
        self._engine, self._dialect, self._plugin = engine, engine.dialect, engine.plugin
        self._target = target
        self._watch = watch
        self._others = others

    async def run(self) -> Refit:
        if not self._dialect.is_known and isinstance(seen := await self._engine.probe(), Unreached):
            return self._ended(Outcome.UNREACHABLE, seen.reason, resumed=True)
        # The service may have died, or given up, while a load ran. A second load beside that one would make a mixture.
        if self._engine.is_unsettled and (fault := await self._settle()) is not None:
            return self._ended(Outcome.UNREACHABLE, fault)
        if self._dialect.lost is not None:
            return self._tainted(self._dialect.lost)
        # A server that sleeps has no weights. Where its contents are unknown, only a load can show what it holds.
        if not self._target.repairs and (reason := await self._dialect.left_alone()) is not None:
            return self._ended(Outcome.UNREACHABLE, reason, resumed=True)
        return await self._prepared() or await self._held()

    async def _settle(self) -> str | None:
        """Wait until a load whose end is not known has ended; why it may still run, None where none does."""
        reply = await self._dialect.http.get(self._dialect.settles_by, self._engine.load_timeout)
        if isinstance(reply, NoReply):
            return reply.reason if reply.lost is CallFailure.DIED else f"a load may still be running: {reply.reason}"
        self._engine.is_unsettled = False
        return None

    async def _prepared(self) -> Refit | None:
        """Have the plugin check the version while the server serves; the end where that is not to be loaded."""
        target, is_plugged = self._target, self._plugin.seen.release is not None
        if target.in_place and not is_plugged:
            reason = "its plugin is gone, and only the plugin can write a delta into what it serves"
            return await self._as_before(reason, needs_full=True)
        vouches = self._plugin.vouches_for(target)
        minds = is_plugged if self._dialect.plugin_minds_all else vouches
        if (reason := refusal(self._dialect.obstacles(plugged=minds))) is not None:
            return await self._as_before(reason)
        if not vouches and target.offered is None:
            await self._plugin.forget()  # what others wrote the server loads by itself
            return None
        with self._watch.during(Stage.PREPARE):
            prepared = await self._plugin.prepare_for(target, self._engine.load_timeout)
        if isinstance(prepared, PrepareRefused):
            return await self._as_before(prepared.reason, needs_full=target.in_place and prepared.needs_full)
        return None

    async def _held(self) -> Refit:
        target, plugged = self._target, self._plugin.vouches_for(self._target)
        try:
            pausing, within = self._watch.during(Stage.PAUSE), self._engine.load_timeout
            before = await self._dialect.hold(target, pausing, within, plugged=plugged)
            if isinstance(before, Before) and self._others is not None:
                # Keys and values of one policy must never be decoded by another: no server loads while another runs.
                before = await self._others() or before
        except asyncio.CancelledError:
            # The service stops, or the engine was removed. No load was sent, so the contents are as before: where they
            # are known, the server is not left paused.
            if not target.repairs:
                await self._resume()
            await asyncio.shield(self._plugin.forget())
            raise
        if self._dialect.lost is not None:  # what it generates is mixed up like its answers
            return self._tainted(self._dialect.lost)
        if not isinstance(before, Before):
            broken_off = await self._back(before)
            await self._plugin.forget()
            return broken_off
        return await self._loaded(before, plugged=plugged)

    async def _send_load(self, target: Target, *, plugged: bool) -> Loading:
        # Set before the call: if this task is cancelled in it, the load goes on in the server.
        self._engine.is_unsettled = True
        with self._watch.during(Stage.LOAD):
            happened = await self._dialect.load(target, self._engine.load_timeout, plugged=plugged)
        self._engine.is_unsettled = isinstance(happened, Unclear) and happened.running
        return happened

    async def _loaded(self, before: Before, *, plugged: bool) -> Refit:
        happened = await self._send_load(self._target, plugged=plugged)
        self._plugin.is_done()
        match happened:
            case Loaded(version, found, how):
                self._plugin.was_loaded(how)
                wanted = self._target.offered or self._target.files
                if version is not None and wanted is not None and version != wanted.version:
                    return self._tainted(f"it says that it serves {version}, not {wanted.version}")
                return await self._verified(self._target, found)
            case Untouched(reason, led=True):
                # What it holds is the leader's business: it is not left paused, whatever is known of it here.
                return replace(await self._refused(reason), led=True)
            case Untouched(reason, reachable=False):
                # The load was never sent. The reconciler resumes an engine that it reaches and whose contents it knows.
                return self._ended(Outcome.UNREACHABLE, reason)
            case Untouched(reason, vouched=True, needs_full=needs_full):
                return await self._as_before(reason, needs_full=self._target.in_place and needs_full)
            case Untouched(reason):
                return await self._proved_untouched(reason, before)
            case Failed(reason):
                return await self._restored(reason, before)
            case Unclear(reason):
                # It may hold a mixture. Paused, it answers no request with it; a full load that is proved ends this.
                return self._tainted(reason)
            case _:
                assert_never(happened)

    async def _proved_untouched(self, reason: str, before: Before) -> Refit:
        with self._watch.during(Stage.VERIFY):
            after = await self._dialect.untouched(before)
        if after.fault is not None:
            return self._tainted(f"{reason}; and {after.fault}")
        return await self._as_before(reason, fingerprint=after.fingerprint)

    async def _restored(self, reason: str, before: Before) -> Refit:
        """Load what it served before, while no request runs: the next one would end the server."""
        again = before.again
        if again is None:
            return self._tainted(f"{reason}; its weights are lost: where the next load fails as well, restart it")
        if not await again.unchanged():
            return self._tainted(
                f"{reason}; and the files of what it served before are no longer those that were checked"
            )
        happened = await self._send_load(again, plugged=False)
        if not isinstance(happened, Loaded):
            said = f"nor does it load what it served before ({happened.reason})"
            return self._tainted(f"{reason}; {said}: restart it")
        back = await self._verified(again, None)
        if back.outcome is not Outcome.ACK:
            return replace(back, reason=f"{reason}; and what it served before is not back: {back.reason}")
        return replace(back, outcome=Outcome.NACK, reason=f"{reason}; what it served before is back")

    async def _verified(self, target: Target, answered: str | None) -> Refit:
        """Prove that the target is served, and resume. `answered`: the fingerprint in the plugin's answers."""
        with self._watch.during(Stage.VERIFY):
            # The files are compared after the load, so that the server has read those that were checked.
            shown, unchanged = await asyncio.gather(self._dialect.verify(target, answered), target.unchanged())
        fault = shown.fault or doubt(shown.fingerprint, target, unchanged=unchanged)
        if fault is not None:
            return self._doubted(replace(shown, fault=fault))
        # Only from here on may it generate: before the proof it would answer with what may be a mixture.
        with self._watch.during(Stage.RESUME):
            resumed = await self._resume()
        if shown.once_resumed is not None and resumed:
            with self._watch.during(Stage.VERIFY):
                shown = await shown.once_resumed()
        if shown.fault is not None:
            return self._doubted(shown)
        self._dialect.serves(target, shown.fingerprint)
        return self._ended(Outcome.ACK, None, resumed=resumed, fingerprint=shown.fingerprint)

    async def _back(self, fault: NoReply | str) -> Refit:
        """The pause broke off. No load was sent, so its contents are as before; if they are known, it is resumed."""
        if isinstance(fault, str):
            return await self._as_before(fault)
        resumed = fault.lost is CallFailure.NEVER_SENT
        if not resumed and not self._target.repairs:
            # The pause may have been carried out all the same.
            with self._watch.during(Stage.RESUME):
                resumed = await self._resume()
        return self._ended(Outcome.UNREACHABLE, fault.reason, resumed=resumed)

    async def _as_before(self, reason: str, *, fingerprint: str | None = None, needs_full: bool = False) -> Refit:
        """Nothing was written, and its contents are as before: it is resumed, unless they are unknown."""
        if self._target.repairs:
            return self._tainted(reason)
        return replace(await self._refused(reason), fingerprint=fingerprint, needs_full=needs_full)

    async def _refused(self, reason: str) -> Refit:
        with self._watch.during(Stage.RESUME):
            resumed = await self._resume()
        return self._ended(Outcome.NACK, reason, resumed=resumed)

    async def _resume(self) -> bool:
        """Let it generate, also where the refit is cancelled; False if the call did not succeed."""
        return False if self._others is not None else await asyncio.shield(self._dialect.resume())

    def _doubted(self, shown: Shown) -> Refit:
        # A record that the contents contradict may be wrong itself: the fingerprint is kept, so that others can tell.
        found = shown.fingerprint if shown.fault == OTHER_TENSORS else None
        tainted = self._tainted(f"loaded, but {shown.fault}")
        return replace(tainted, fingerprint=found, overwritten=shown.overwritten)

    def _tainted(self, reason: str) -> Refit:
        return self._ended(Outcome.TAINTED, reason)

    def _ended(
        self, outcome: Outcome, reason: str | None, *, resumed: bool = False, fingerprint: str | None = None
    ) -> Refit:
        timings = self._watch.milliseconds
        return Refit(outcome=outcome, resumed=resumed, reason=reason, fingerprint=fingerprint, timings=timings)


def doubt(found: str | None, target: Target, *, unchanged: bool) -> str | None:
    """Why a server does not hold the target, by its fingerprint; None where nothing speaks against it. Pure.

    Contents decide where they can be compared: with what a clean load of the version gave before, and with what the
    server held before this load. `found`: the fingerprint after the load; None where the server cannot tell.
    `unchanged`: whether the files are still those that were checked. Where they are not, a trainer may have written
    there between the last look and the end of the load, and only a clean load's record proves what was read.
    """
    same = None if found is None or target.fingerprint is None else alike(found, target.fingerprint)
    if not unchanged and not same:
        return "its files changed meanwhile, or it is not known whether they did"
    if same is False:
        return OTHER_TENSORS
    if same is None and found is not None and found == target.not_fingerprint:
        return "its tensors have not changed, and the files of the two versions differ"
    return None
