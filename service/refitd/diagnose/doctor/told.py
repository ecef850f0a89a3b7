"""What the service that runs says of its engines (the state of each, and who carries out its loads) and of itself.

Beside what doctor asks the engines itself: a service knows of engines that nobody names on doctor's command line, has
keys that doctor may lack, and sees them from its own host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

import msgspec

from refitd.diagnose.doctor.door import CALL_SECONDS, service_at
from refitd.diagnose.doctor.engines import LOADS_WHOLE, LOADS_WHOLE_FIX
from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.engine.http import NoReply, Reply
from refitd.settings import Settings
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Engine, Faults, Page

AnswerT = TypeVar("AnswerT")


async def ask_of_engines(settings: Settings, url: str) -> Sequence[Engine] | Finding:
    """Its engines, or why it does not say."""
    told = await _ask(settings, url, "/v1/engines", Page[Engine])
    return told.items if isinstance(told, Page) else _unsaid(url, Check.ENGINES, "what its engines are", told)


async def ask_of_faults(settings: Settings, url: str) -> Faults | Finding:
    """What is wrong with it itself, or why it does not say."""
    told = await _ask(settings, url, "/v1/faults", Faults)
    return told if isinstance(told, Faults) else _unsaid(url, Check.LOCK, "what is wrong with itself", told)


async def _ask(settings: Settings, url: str, route: str, kind: type[AnswerT]) -> AnswerT | str:
    """The answer, or why there is none."""
    tokens = settings.tokens()
    token = next(iter([*tokens.read, *tokens.write]), None)
    reply = await service_at(url, token).get(route, CALL_SECONDS)
    try:
        if isinstance(reply, Reply) and reply.ok:
            return msgspec.convert(reply.data, kind)
    except msgspec.ValidationError as error:
        return f"{route} was answered with something else: {error}"
    return reply.reason if isinstance(reply, NoReply) else f"{route} was answered with {reply.status}"


def _unsaid(url: str, check: Check, what: str, why: str) -> Finding:
    return Finding(
        check=check,
        subject=url,
        verdict=Verdict.UNKNOWN,
        text=f"the service does not say {what}: {why}",
        fix="give doctor a token of its --token-file or --read-token-file, and run the same refitd here and there",
    )


# Warnings: some are over by themselves a moment after a start. Doctor's own checks say what keeps a job from running.
_OF_FAULTS: Mapping[str, tuple[Check, str]] = {
    "root": (Check.ROOT, "wait for the first listing after a start; else mount the root again"),
    "engines": (Check.ENGINES, "mend the engines file, or the place of --discover"),
    "journal": (Check.JOURNAL, "make room on the disk of the state folder; one that is being rebuilt needs nothing"),
    "disk": (Check.SPACE, "unpin versions, close runs that have ended, or raise --disk-budget"),
    "folders": (Check.ROOT, "remove folders that are no versions, and close runs that have ended"),
}


def judge_faults(faults: Faults) -> Iterator[Finding]:
    """What is wrong with the service itself."""
    for part, fault in asdict(faults).items():
        if fault is not None:
            check, fix = _OF_FAULTS[part]
            text = f"the service says: {fault}"
            yield Finding(check=check, subject="service", verdict=Verdict.WARNING, text=text, fix=fix)


def judge_told(engines: Sequence[Engine]) -> Iterator[Finding]:
    """What it says of each."""
    for engine in engines:
        text = f"the service says {engine.state}{_why(engine)}; {_serving(engine)}; {_loads(engine)}"
        verdict, fix = _verdict(engine)
        if fix is None:
            yield good(Check.ENGINES, engine.id, text)
        else:
            yield Finding(check=Check.ENGINES, subject=engine.id, verdict=verdict, text=text, fix=fix)


def _verdict(engine: Engine) -> tuple[Verdict, str | None]:
    match engine.state:
        case EngineState.UNREACHABLE:
            return Verdict.FAILED, "start it, or mend the way to it: the service brings it to its target by itself"
        case EngineState.QUARANTINED:
            return Verdict.FAILED, f"see its log, then restart it, or 'refitd engines resync {engine.id}'"
        case EngineState.CONTESTED:
            fix = "stop the other service, trainer or script that loads it, or take one of its two names out"
            return Verdict.FAILED, f"{fix}; then 'refitd engines resync {engine.id}'"
        case EngineState.TAINTED | EngineState.NACKED:
            return Verdict.WARNING, f"'refitd explain {engine.id}' says what was tried, and what comes next"
        case _ if engine.loads_whole:
            return Verdict.WARNING, LOADS_WHOLE_FIX
        case _:
            return Verdict.OK, None


def _why(engine: Engine) -> str:
    return "" if engine.reason is None else f" ({engine.reason})"


def _serving(engine: Engine) -> str:
    if engine.run is None:
        return "it follows no run"
    return f"it follows run {engine.run} and " + (
        "serves no version of it" if engine.version is None else f"is on {engine.version}"
    )


def _loads(engine: Engine) -> str:
    if engine.plugin is not None:
        how = f", {LOADS_WHOLE}: {engine.through_loader}" if engine.loads_whole else ""
        return f"refitd's plugin {engine.plugin} carries out its loads{how}"
    if engine.stock_reason is None:
        return "who carries out its loads is not known yet"
    return f"its loads are SGLang's own: {engine.stock_reason}"
