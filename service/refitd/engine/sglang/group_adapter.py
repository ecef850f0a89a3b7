"""The adapter to a stock SGLang that takes versions over a process group as well (`--sglang-stock-transfers`, ADR 24).

The transaction of such a version, and what is sent when it breaks off. All else is as in `adapter`.

    meet      the sender says what checksums the version gives; refused → nothing was asked of the engine
    join      the engine's ranks and the sender make a group, while it generates; broke off → the sender ends, which
              frees the engine, and `/generate` shows that it is
    pause     and begin a session; broke off → resume, contents are known
    load      bucket by bucket. From the first one on each failure and each doubt is TAINTED: the sender ends, the
              engine stays paused, and the rollout loads files
    verify    the checksums of every parameter on every rank are those that the sender gave; else TAINTED
    resume    and a few tokens of `/generate`; none → TAINTED

An engine that had other checksums than expected twice in a row takes no more versions so until the service restarts: it
may make its parameters of the tensors in a way that is not known. Nor does one that answers 404 to a route of these, as
long as its process lives: the answer is the same for each version to come.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from http import HTTPStatus

from refitd.engine.fingerprints import SENT_PROOF, comparable
from refitd.engine.http import NoReply, Reply
from refitd.engine.port import (
    UNTOLD,
    Offered,
    Outcome,
    Process,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.sglang import calls
from refitd.engine.sglang.adapter import SglangEngine
from refitd.engine.sglang.group_calls import OLDEST, SESSIONS, StockGroup
from refitd.engine.sglang.info import read_model_info
from refitd.engine.sglang.sender_line import SenderLine, SenderLostError, read_offer
from refitd.engine.sglang.stores import clear
from refitd.engine.sglang.verify import TRIAL, checksums_in, digest_of, trial_fault
from refitd_client.contract.receivers import StockReceiver
from refitd_client.transport.group.stock_words import (
    BUCKETS_SECONDS,
    BucketsSent,
    EngineReady,
    Expected,
    buckets,
    why_not_proved,
)
from refitd_client.transport.ipc.offer import OfferedTensor

FREE_SECONDS = 60.0  # in which an engine is to answer again after its sender has ended
ALIVE_SECONDS = 10.0
MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """A sender that has joined the engine's group, and what it is to send."""

    line: SenderLine
    group: StockGroup
    expected: Expected
    buckets: list[list[OfferedTensor]]


class SglangGroupEngine(SglangEngine):
    """One SGLang server that takes versions by files, and over a process group where a trainer asks for that."""

    _doubts = 0  # versions in a row that it had other checksums of than expected
    _lacks: tuple[Process, str] | None = None  # a process without a route that was asked for, and the sentence
    _hangs = False  # whether it joined a group and was not seen to generate since

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. Also whether it takes versions over a group."""
        if self._hangs and (fault := await self._sign_of_life()) is not None:
            return Unreached(reason=fault, advice="end the trainer's processes, and restart it if that does not help")
        seen = await super().probe()
        if isinstance(seen, Unreached) or self._server is None or self._plugin.release is not None:
            return seen
        if (reason := self._why_not()) is not None:
            return replace(seen, group_refusal=reason)
        device = self._server.device
        receiver = StockReceiver(engine="", url=self._http.url, ranks=self._server.launch.ranks, device=device)
        return replace(seen, stock_receiver=receiver)

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        """See `Engine`."""
        if target.offered is None or self._plugin.release is not None:
            return await super().refit(target, on_stage)
        watch = Stopwatch(on_stage)
        if self._server is None and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        if self._unsettled and (fault := await self._settle()) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=False, reason=fault)
        if (reason := self._why_not() or self._refusal(target)) is not None:
            return await self._as_before(reason, None, target, watch)
        with watch.during(Stage.PREPARE):
            met = await self._meet(target.offered)
        if isinstance(met, str):
            if self._hangs and (fault := await self._sign_of_life()) is not None:
                return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=f"{met}; and {fault}")
            return await self._as_before(met, None, target, watch)
        try:
            return await self._receive(met, target, watch)
        finally:
            met.line.close()

    def _why_not(self) -> str | None:
        """Why it takes no version over a group; None where it does."""
        if self._server is None:
            return "it was not reached"
        if self._plugin.release is not None:
            return "it has refitd inside"
        if self._server.launch.dp_ranks > 1:
            return f"it has {self._server.launch.dp_ranks} data-parallel ranks, and SGLang lets one join a group"
        if not self._dialect.checksums or not self._dialect.has(OLDEST):
            return f"SGLang {self._server.version} gives no checksums of its tensors"
        if self._server.drafts:
            return "it has a draft model, which a version over a group would not reach as one from files does"
        if self._lacks is not None and self._server.process.is_as(self._lacks[0]) is not False:
            return self._lacks[1]
        if self._doubts >= MOST_DOUBTS:
            return f"{self._doubts} versions in a row that it received over a group could not be proved"
        return None

    async def _sign_of_life(self) -> str | None:
        """Why it is not known to generate; None where it has just done. /ping is answered by one that hangs, too.

        A server that is paused or busy may answer too late. Its scheduler is asked, which is what hangs.
        """
        reply = await self._http.ask("/generate", TRIAL, ALIVE_SECONDS)
        if isinstance(reply, NoReply) and await calls.settle(self._http, ALIVE_SECONDS) is not None:
            return f"it was to join a trainer's group, and does not generate since: {reply.reason}"
        self._hangs = False
        return None

    async def _meet(self, offered: Offered) -> _Met | str:
        """Meet the sender, and have the engine join its group; why it has not. Nothing is paused."""
        line: SenderLine | None = None
        try:
            if self._root is None:
                return "its root is not known"
            offer, transfer, secret = await read_offer(self._root, offered.offer)
            if offer.version != offered.version:
                return f"the offer is of {offer.version}, not of {offered.version}"
            line = await SenderLine.to(transfer, self._http.url)
            ranks = await self._checksums()
            if isinstance(ranks, str):
                line.close()
                return ranks
            device = "" if self._server is None else self._server.device
            welcome = await line.meet(transfer, secret, self._http.url, device, ranks)
            group = StockGroup(self._http, welcome.group, sessions=self._dialect.has(SESSIONS), lacks=self._note_lack)
            self._hangs = True
            await _joined(line, group.join(transfer, welcome, len(ranks)))
            self._hangs = False
            return _Met(line=line, group=group, expected=welcome.expected, buckets=list(buckets(offer.layout.tensors)))
        except SenderLostError as error:
            if line is not None:
                line.close()
            return str(error)
        except BaseException:
            if line is not None:
                line.close()
            raise

    async def _receive(self, met: _Met, target: Target, watch: Stopwatch) -> Refit:
        begun = False
        try:
            with watch.during(Stage.PAUSE):
                fault = await clear(self._http, self._stores) or await self._pause(target)
                fault = await met.group.begin() if fault is None else fault
            if fault is None:
                begun = True
                await met.line.say(EngineReady())
        except SenderLostError as error:
            fault = str(error)
        except asyncio.CancelledError:
            met.line.close()
            await self._resume_after_refit()  # nothing was loaded
            raise
        if fault is not None:
            met.line.close()
            if begun:
                await met.group.end()
            back = await self._back(fault, target, watch)
            await met.group.leave()
            return back
        self._unsettled = True
        try:
            with watch.during(Stage.LOAD):
                fault = await self._load_buckets(met, target)
        except asyncio.CancelledError:
            met.line.close()
            raise
        if fault is None:
            self._unsettled = False
            return await self._prove(met, target, watch)
        return await self._failed(fault, met, watch)

    async def _load_buckets(self, met: _Met, target: Target) -> str | None:
        """Why the version was not loaded; None where engine and sender say that it was."""
        try:
            async with asyncio.timeout(BUCKETS_SECONDS):
                fault = await met.group.load(met.buckets, target.label)
        except TimeoutError:
            return f"it has not received all in {BUCKETS_SECONDS:g} s"
        if fault is not None:
            return fault
        try:
            await met.line.hear(BucketsSent, ALIVE_SECONDS)
        except SenderLostError as error:
            return f"the engine says that it has received all, and {error}"
        return await met.group.end()

    async def _failed(self, reason: str, met: _Met, watch: Stopwatch) -> Refit:
        """Unknown contents. The sender ends with its connection, and with it what the engine waits for."""
        await met.line.over(reason)
        met.line.close()
        fault = await calls.settle(self._http, FREE_SECONDS)
        self._unsettled = fault is not None
        if fault is None:
            await met.group.end()  # else it refuses the next session
            await met.group.leave()
        left = "" if fault is None else f"; and {fault}"
        # What a group does wrong says nothing against the version, whose files are still to come.
        return Refit(
            outcome=Outcome.TAINTED,
            resumed=False,
            reason=f"received over a group: {reason}{left}",
            overwritten=True,
            timings=watch.milliseconds,
        )

    async def _prove(self, met: _Met, target: Target, watch: Stopwatch) -> Refit:
        """Hold what the engine has now against what was published, and let it generate."""
        with watch.during(Stage.VERIFY):
            fault = await clear(self._http, self._stores)
            info, ranks = await asyncio.gather(self._http.get("/model_info", calls.PROBE_SECONDS), self._checksums())
        said = read_model_info(info, self._http.url)
        if fault is not None or isinstance(ranks, str) or isinstance(said, str):
            why = next(each for each in (fault, ranks, said) if isinstance(each, (str, NoReply)))
            return await self._failed(
                f"it cannot be verified: {why if isinstance(why, str) else why.reason}", met, watch
            )
        if (doubt := why_not_proved(ranks, met.expected)) is not None:
            self._doubts += 1
            return await self._failed(doubt, met, watch)
        contents = digest_of([{"checksums": each} for each in ranks])
        recorded = target.fingerprint if contents is not None and comparable(contents, target.fingerprint) else contents
        if said.weight_version != target.label or contents != recorded:
            doubt = f"it says weight_version {said.weight_version!r}, or a clean load of the version gave other tensors"
            return await self._failed(doubt, met, watch)
        self._last, self._doubts = said, 0
        with watch.during(Stage.RESUME):
            resumed = await self._resume_after_refit()
        if resumed and (silent := await self._silence(target)) is not None:
            await calls.pause(self._http, "abort", drains=False)
            return await self._failed(f"it holds the version, and {silent}", met, watch)
        await met.line.over()
        await met.group.leave()
        return Refit(
            outcome=Outcome.ACK,
            resumed=resumed,
            fingerprint=contents,
            proof=SENT_PROOF,
            names=said.model_path,
            timings=watch.milliseconds,
        )

    async def _silence(self, target: Target) -> str | None:
        """What is wrong with the first answer after the update; None where nothing is, or where it is only busy."""
        reply = await self._http.ask("/generate", TRIAL, FREE_SECONDS)
        if isinstance(reply, NoReply) and await calls.settle(self._http, ALIVE_SECONDS) is None:
            return None
        return trial_fault(reply, target.label)

    async def _checksums(self) -> list[dict[str, str]] | str:
        """The checksums of each rank's parameters, or why there are none."""
        reply = await self._http.post("/weights_checker", {"action": "checksum"}, calls.CHECK_SECONDS)
        if isinstance(reply, NoReply):
            return reply.reason
        found = checksums_in(reply.data.get("ranks")) if reply.ok and reply.data is not None else None
        if reply.status == HTTPStatus.NOT_FOUND:
            self._note_lack("/weights_checker", reply)
        return found or f"it gives no checksums: {reply.short_message}"

    def _note_lack(self, route: str, reply: Reply) -> None:
        process = UNTOLD if self._server is None else self._server.process
        self._lacks = (process, f"it has no {route}, which is answered {reply.status}: {reply.short_message}")


async def _joined(line: SenderLine, joining: Coroutine[None, None, str | None]) -> None:
    """Wait until sender and engine have joined. Where one does not, the sender ends, and the engine's call with it.

    Raises:
        SenderLostError: one has not.
    """
    engine, sender = asyncio.create_task(joining), asyncio.create_task(line.group_made())
    try:
        await asyncio.wait({engine, sender}, return_when=asyncio.FIRST_COMPLETED)
        fault = engine.result() if engine.done() else None
        if fault is None:
            await sender
            fault = await engine
    except SenderLostError as error:
        line.close()
        await asyncio.wait({engine})
        fault = str(error)
    finally:
        engine.cancel()
        sender.cancel()
        await asyncio.gather(engine, sender, return_exceptions=True)
    if fault is not None:
        raise SenderLostError(f"its ranks have not joined the group: {fault}")
