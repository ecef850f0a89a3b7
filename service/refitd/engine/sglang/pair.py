"""Several SGLang servers that are updated as one: some prefill prompts, and hand the keys and values to others, which
decode. Keys and values of one policy must never be decoded by another (ADR 17).

To the reconciler a pair is one engine, with one record and one proof. Each member goes through the transaction of all
servers (`transaction.py`), with two differences: none loads before all are paused, each with `abort`, until a flush
shows that no request in it holds keys and values; and all are resumed when each has proved the version, or when none
was written to. Where one member has loaded and another has not, the contents of the pair are unknown: all stay paused
until a full load of every member was proved.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

from refitd.engine.plugin import EnginePlugin
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    Obstacle,
    Offered,
    Outcome,
    Process,
    RankProof,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.sglang.dialect import SglangDialect
from refitd.engine.transaction import ServerEngine, refusal

_AND = "+"  # between the fingerprints of members


class Together:
    """One refit of a pair: no member loads before all are paused.

    Attributes:
        fault: why no member may load; None while nothing is known.
    """

    def __init__(self, members: Iterable[str]) -> None:
        self.fault: str | None = None
        self._missing = set(members)
        self._decided = asyncio.Event()

    @property
    def may_load(self) -> bool:
        return self._decided.is_set() and self.fault is None

    def arrive(self, member: str, fault: str | None = None) -> None:
        """A member is paused, or will not load for a `fault`. What it says later is not heard."""
        if member in self._missing:
            self._missing.remove(member)
            self.fault = self.fault or fault
        if not self._missing or self.fault is not None:
            self._decided.set()

    async def others_paused(self, member: str) -> str | None:
        """Wait until all are paused, as this one is; why none may load, None where all may."""
        self.arrive(member)
        await self._decided.wait()
        return self.fault


class PairMember(ServerEngine):
    """One server of a pair. It is resumed with the others, and never by itself."""

    def __init__(self, dialect: SglangDialect, plugin: EnginePlugin, load_timeout: float) -> None:
        super().__init__(dialect, plugin, load_timeout)
        self.sglang = dialect

    @property
    def url(self) -> str:
        return self.sglang.http.url

    async def refit_in(self, together: Together, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        why = "it broke off"
        try:
            done = await self.refit(target, on_stage, partial(together.others_paused, self.url))
            why = done.reason or why
            return done
        finally:
            together.arrive(self.url, f"{self.url}: {why}")  # where it has ended before a load


class SglangPair:
    """Servers behind one `EnginePort`. The first one's URL is the pair's."""

    def __init__(self, members: Sequence[PairMember]) -> None:
        self._members = members

    async def probe(self) -> Reached | Unreached:
        """See `EnginePort`. A pair is reached when every member is."""
        seen = await asyncio.gather(*(member.probe() for member in self._members))
        for each in seen:
            if isinstance(each, Unreached):
                return each
        reached = [each for each in seen if isinstance(each, Reached)]
        first = reached[0]
        named = dict.fromkeys((each.model_path, each.weight_version) for each in reached)
        return replace(
            first,
            # A name that no version has, where members name different ones: the pair serves no version then.
            model_path=" and ".join(path for path, _ in named),
            weight_version=first.weight_version if len(named) == 1 else None,
            configuration=" and ".join(each.configuration for each in reached),
            plugin=first.plugin if all(each.plugin for each in reached) else None,
            takes_offers=False,
            stock_reason=next((each.stock_reason for each in reached if each.stock_reason), None),
            process=_one_process([each.process for each in reached]),
            led_by=next((each.led_by for each in reached if each.led_by), None),
            loader=max((e.loader for e in reached if e.loader), key=lambda loader: loader.whole, default=None),
            obstacles=(*self._roles(), *(obstacle for each in reached for obstacle in each.obstacles)),
            may_read=tuple(dict.fromkeys(path for path, _ in named)),
            draft=next((each.draft for each in reached if each.draft), None),
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        are_known = all(member.sglang.is_known for member in self._members)
        if not are_known and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        watch = Stopwatch(on_stage)
        if (blocked := refusal(self._roles())) is not None:
            return await self._ended(Outcome.NACK, blocked, target, [], watch)
        together = Together(member.url for member in self._members)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(member.refit_in(together, _part(target, number, len(self._members)), on_stage))
                    for number, member in enumerate(self._members)
                ]
        except asyncio.CancelledError:
            if not together.may_load and not target.repairs:
                await asyncio.shield(self.resume())
            raise
        refits = [task.result() for task in tasks]
        outcome = outcome_of(refits)
        told = [
            refit.reason if refit.reason == together.fault else f"{member.url}: {refit.reason}"
            for member, refit in zip(self._members, refits, strict=True)
            if refit.outcome is not Outcome.ACK
        ]
        reason = "; ".join(dict.fromkeys(each for each in told if each)) or None
        if any(refit.outcome is Outcome.ACK for refit in refits) and outcome is Outcome.TAINTED:
            reason = f"a part of its servers serves it, and another does not: {reason}"
        return await self._ended(outcome, reason, target, refits, watch)

    async def _ended(
        self, outcome: Outcome, reason: str | None, target: Target, refits: Sequence[Refit], watch: Stopwatch
    ) -> Refit:
        """The end of a refit: where the contents are known, all members are resumed."""
        led, resumed = any(refit.led for refit in refits), False
        if outcome is Outcome.ACK or (outcome is not Outcome.TAINTED and (led or not target.repairs)):
            with watch.during(Stage.RESUME):
                resumed = await asyncio.shield(self.resume())
        timings = {
            stage: max(each.timings.get(stage, 0.0) for each in refits) for each in refits for stage in each.timings
        }
        return Refit(
            outcome=Outcome.TAINTED if outcome is Outcome.NACK and target.repairs and not led else outcome,
            resumed=resumed,
            reason=reason,
            fingerprint=_joined([refit.fingerprint for refit in refits]) if outcome is Outcome.ACK else None,
            needs_full=outcome is Outcome.NACK and any(refit.needs_full for refit in refits),
            led=led,
            overwritten=any(refit.overwritten for refit in refits),
            timings=timings | watch.milliseconds,
        )

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `EnginePort`. The service reads by itself what such an engine loads."""
        await asyncio.gather(*(member.prefetch(version) for member in self._members))
        return ()

    async def cancel_prefetch(self) -> None:
        await asyncio.gather(*(member.cancel_prefetch() for member in self._members))

    async def fingerprint(self, alike: str | None = None) -> str | None:
        parts = _parts(alike, len(self._members))
        found = (member.fingerprint(part) for member, part in zip(self._members, parts, strict=True))
        return _joined(await asyncio.gather(*found))

    async def trial(self, label: str) -> str | None:
        """See `EnginePort`. Asks each decode server, with a prefill server, as a router does."""
        prefill = cycle([member.sglang for member in self._members if member.sglang.role == "prefill"])
        for decode in [member.sglang for member in self._members if member.sglang.role == "decode"]:
            if (fault := await decode.trial_with(next(prefill), secrets.randbelow(2**63), label)) is not None:
                return fault
        return None

    async def resume(self) -> bool:
        return all(await asyncio.gather(*(member.resume() for member in self._members)))

    async def check_changes(self) -> ChangeCheck:
        found = await asyncio.gather(*(member.check_changes() for member in self._members))
        return next((each for each in found if each.fault is not None), found[0])

    async def aclose(self) -> None:
        await asyncio.gather(*(member.aclose() for member in self._members))

    def _roles(self) -> Iterator[Obstacle]:
        """What is wrong with the members of the pair, as far as they were reached."""
        for member in self._members:
            if member.sglang.is_known and member.sglang.role is None:
                text = f"{member.url} prefills and decodes by itself, and is named as one of a pair"
                yield Obstacle(text=text, fix="give it an entry of its own in the engines file")
        if all(member.sglang.is_known for member in self._members):
            for role in sorted({"prefill", "decode"} - {member.sglang.role for member in self._members}):
                text = f"none of its servers is started with --disaggregation-mode {role}"
                yield Obstacle(text=text, fix="name all servers that share keys and values in one entry, with 'pair'")


def outcome_of(refits: Sequence[Refit]) -> Outcome:
    """How a refit of a pair ended, by those of its members. Pure."""
    found = {refit.outcome for refit in refits}
    if Outcome.TAINTED in found or (Outcome.ACK in found and len(found) > 1):
        return Outcome.TAINTED
    return Outcome.UNREACHABLE if Outcome.UNREACHABLE in found else found.pop()


def _part(target: Target, number: int, members: int) -> Target:
    """A target for one member. The fingerprints of a pair are those of its members, in order."""
    return replace(
        target,
        fingerprint=_parts(target.fingerprint, members)[number],
        not_fingerprint=_parts(target.not_fingerprint, members)[number],
    )


def _parts(fingerprint: str | None, members: int) -> list[str | None]:
    parts = [] if fingerprint is None else fingerprint.split(_AND)
    return [*parts] if len(parts) == members else [None] * members


def _joined(fingerprints: Sequence[str | None]) -> str | None:
    known = [each for each in fingerprints if each is not None]
    return _AND.join(known) if len(known) == len(fingerprints) else None


def _one_process(processes: Sequence[Process]) -> Process:
    """What tells these processes from those of a pair of which one was restarted; nothing where one tells nothing."""
    told = [each.started or (None if each.seed is None else str(each.seed)) for each in processes]
    return Process(started=_joined(told))
