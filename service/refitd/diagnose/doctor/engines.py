"""Each engine asked: is it there, can refitd drive it, do the keys open what they have to, what is its clock.

Whether the key opens changes is found out by an update that names no model: SGLang looks at the key first, and then
refuses the request as incomplete (400 or 422). Nothing is paused and nothing is loaded.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.fsck.roster import Roster
from refitd.engine.connect import key_files
from refitd.engine.engines_file import EngineSpec
from refitd.engine.http import Lost, NoReply, Reply, Transport
from refitd.engine.plugin.rank_group import NOBODY
from refitd.engine.port import Reached, Unreached
from refitd.policy.twins import is_one_server
from refitd_client.validation.reference import ReferenceRefusedError, read_reference

CALL_SECONDS = 5.0
SKEW_SECONDS = 5.0  # a Date header has whole seconds, and the call takes its time
_READ = "/model_info"
_UPDATE = "/update_weights_from_disk"
_INCOMPLETE = frozenset({400, 422})
_UNAUTHORISED = frozenset({401, 403})
_NO_ROUTE = frozenset({404, 405})
_BROKEN = 500  # this status and those above: the server's own fault, or a proxy's
_UNTOLD = frozenset({"None", "?"})  # as they stand in a configuration, which is made to be compared
LOADS_WHOLE = "each of them through SGLang's loader, which is slow, and refuses deltas"
LOADS_WHOLE_FIX = "the runbook's RefitdLoadsThroughLoader says for which models that is so, and what to do about others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one engine answered. `change` is None where it was not asked, `skew` in seconds where it tells its time.

    `read` is what it says when it is asked what it serves once more, where it cannot be driven.
    """

    name: str
    spec: EngineSpec
    root: str
    seen: Reached | Unreached
    read: Reply | NoReply | None = None
    change: Reply | NoReply | None = None
    skew: float | None = None


async def ask_engines(roster: Roster) -> list[Asked]:
    """Ask all of them at once."""
    return await asyncio.gather(*(_ask(roster, name) for name in sorted(roster.specs)))


async def _ask(roster: Roster, name: str) -> Asked:
    spec, settings = roster.specs[name], roster.settings
    root = spec.root or settings.path_map or str(settings.root.resolve())
    engine = roster.connect(name)
    http = Transport(spec.url, **key_files(settings.engine_access, spec, roster.is_named), guard=roster.guard)
    try:
        seen = await engine.probe()
    finally:
        await engine.aclose()
    if isinstance(seen, Unreached):
        return Asked(name=name, spec=spec, root=root, seen=seen, read=await http.get(_READ, CALL_SECONDS))
    reply = await http.post(_UPDATE, {}, CALL_SECONDS)
    return Asked(name=name, spec=spec, root=root, seen=seen, change=reply, skew=skew_of(reply))


def skew_of(reply: Reply | NoReply) -> float | None:
    """How far the server's clock is ahead, in seconds; None where it does not tell its time."""
    if isinstance(reply, NoReply) or reply.date is None:
        return None
    try:
        return parsedate_to_datetime(reply.date).timestamp() - time.time()
    except ValueError:
        return None


def judge_engine(asked: Asked) -> Iterator[Finding]:
    """What the answers mean."""
    if isinstance(asked.seen, Unreached):
        text, fix = asked.seen.reason, _way_in(asked.read)
        yield Finding(check=Check.REACHABLE, subject=asked.name, verdict=Verdict.FAILED, text=text, fix=fix)
        return
    yield good(Check.REACHABLE, asked.name, f"SGLang {_started_as(asked.seen)}")
    yield _plugin(asked.name, asked.seen)
    if asked.change is not None:
        yield _changes(asked.name, asked.change)
    yield _clock(asked.name, asked.skew)


def judge_start_up_model(asked: Asked) -> Iterator[Finding]:
    """Whether versions can be held against the model that the engine was started with. Reads the model's headers."""
    path = asked.seen.startup_path if isinstance(asked.seen, Reached) else None
    if path is None:
        return
    fix = "name the same model in a folder that the service's user can read: --base-model DIR"
    try:
        read_reference(Path(path))
    except (FileNotFoundError, ReferenceRefusedError) as error:
        verdict, text = Verdict.WARNING, f"without --base-model versions are rejected: {error}"
    except OSError as error:
        verdict = Verdict.FAILED
        text = f"without --base-model no version has a verdict: user id {os.geteuid()} cannot read {path}: {error}"
    else:
        yield good(Check.START_UP_MODEL, asked.name, f"versions are held against {path}")
        return
    yield Finding(check=Check.START_UP_MODEL, subject=asked.name, verdict=verdict, text=text, fix=fix)


def _started_as(seen: Reached) -> str:
    """Its release and how it was started; what the server does not tell is left out."""
    told = seen.configuration.removeprefix(f"sglang {seen.server_version} ").split()
    return ", ".join(
        [seen.server_version or "of an unknown release", " ".join(word for word in told if word not in _UNTOLD)]
    )


def judge_names(asked: Sequence[Asked]) -> Iterator[Finding]:
    """Whether two of the names lead to one server."""
    for at, one in enumerate(asked):
        for other in asked[:at]:
            if is_one_server(one.seen, other.seen):
                text = (
                    f"{one.spec.url} and {other.spec.url} are one server: the service loads it by one of the two names"
                )
                fix = "take one of the two out of --engine, the engines file or what is discovered"
                yield Finding(check=Check.ENGINES, subject=one.name, verdict=Verdict.FAILED, text=text, fix=fix)


def _way_in(read: Reply | NoReply | None) -> str:
    """What to do about an engine that cannot be driven."""
    match read:
        case Reply(status=status) if status in _UNAUTHORISED:
            return "give it the key that it was started with (--api-key): --engine-key-file names its file"
        case Reply(status=status) if status in _NO_ROUTE:
            return "is this an SGLang that refitd can drive? Name an engine's own address, not that of a gateway"
        case Reply(status=status) if status >= _BROKEN:
            return "see its log, and that of a proxy before it"
        case Reply():
            return "name an SGLang server, of a release and with settings that refitd can drive"
        case NoReply(lost=Lost.NEVER_SENT) | None:
            return "start it, or correct its URL, its key's file or --engine-allow"
        case NoReply():
            return "see its log: something listens there, and does not answer"


def _plugin(name: str, seen: Reached) -> Finding:
    if seen.plugin is not None and seen.loader is not None and seen.loader.whole:
        text = f"refitd {seen.plugin} inside it carries out its loads, {LOADS_WHOLE}: {seen.loader.reason}"
        return Finding(check=Check.PLUGIN, subject=name, verdict=Verdict.WARNING, text=text, fix=LOADS_WHOLE_FIX)
    if seen.plugin is not None:
        text = f"refitd {seen.plugin} inside it carries out its loads, and takes deltas in place"
        return good(Check.PLUGIN, name, text)
    if seen.stock_reason in {None, NOBODY}:
        return good(Check.PLUGIN, name, "none speaks for it: its loads are SGLang's own, and deltas reach it as copies")
    text = f"its loads are SGLang's own, though a plugin may be there: {seen.stock_reason}"
    fix = "install this very refitd beside every rank, with REFITD_SGLANG_ROOT set to the root as the server sees it"
    return Finding(check=Check.PLUGIN, subject=name, verdict=Verdict.WARNING, text=text, fix=fix)


def _changes(name: str, reply: Reply | NoReply) -> Finding:
    if isinstance(reply, NoReply):
        fix = "see the engine's log: it answers reads and not this"
        return Finding(check=Check.CHANGES, subject=name, verdict=Verdict.FAILED, text=reply.reason, fix=fix)
    if reply.status in _INCOMPLETE:
        return good(Check.CHANGES, name, "the key opens changes")
    if reply.status in _UNAUTHORISED:
        text = f"the key that it got, if any, does not open changes ({reply.status})"
        fix = "--engine-admin-key-file holds its --admin-api-key"
    elif reply.status in _NO_ROUTE:
        text = f"it has no {_UPDATE} ({reply.status}): a gateway or another front end"
        fix = "name each engine's own address: gateways have no routes for weights"
    else:
        text = f"an update that names no model was answered with {reply.status}: {reply.short_message}"
        fix = "is this SGLang itself, of a release that refitd knows?"
    return Finding(check=Check.CHANGES, subject=name, verdict=Verdict.FAILED, text=text, fix=fix)


def _clock(name: str, skew: float | None) -> Finding:
    if skew is None:
        text = "it does not tell its time"
        return Finding(check=Check.ENGINE_CLOCK, subject=name, verdict=Verdict.UNKNOWN, text=text)
    text = f"its clock differs by {round(skew) + 0:+} s"
    if abs(skew) <= SKEW_SECONDS:
        return good(Check.ENGINE_CLOCK, name, text)
    fix = "have its host and this one follow one time server (NTP): logs and events cannot be put in order"
    return Finding(check=Check.ENGINE_CLOCK, subject=name, verdict=Verdict.WARNING, text=text, fix=fix)
