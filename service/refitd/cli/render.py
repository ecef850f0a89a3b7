"""How versions, engines and plans look to people. Pure: wire types in, Rich renderables out."""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import assert_never

from rich.text import Text

from refitd.cli.table import Table
from refitd.text import clean, size_of, spoken
from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import DeliveryState, EngineState, VersionState, WaitOutcome
from refitd_client.contract.wire import Delivery, Engine, EngineOnVersion, Explanation, ReclaimPlan, Version, WaitResult

NOTHING = "-"
_HASH = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}\b")

_GOOD = "green"
_BUSY = "yellow"
_BAD = "bold red"
_OVER = "dim"

_VERSION_STYLES: Mapping[VersionState, str] = {
    VersionState.ANNOUNCED: _BUSY,
    VersionState.SETTLING: _BUSY,
    VersionState.VALIDATING: _BUSY,
    VersionState.UNKNOWN: _BUSY,
    VersionState.SEALED: _GOOD,
    VersionState.RETIRED: _OVER,
    VersionState.DELETED: _OVER,
    VersionState.REJECTED: _BAD,
    VersionState.LOST: _BAD,
}
_ENGINE_STYLES: Mapping[EngineState, str] = {
    EngineState.IN_SYNC: _GOOD,
    EngineState.PROBING: _BUSY,
    EngineState.BEHIND: _BUSY,
    EngineState.UPDATING: _BUSY,
    EngineState.VERIFYING: _BUSY,
    EngineState.NACKED: _BAD,
    EngineState.TAINTED: _BAD,
    EngineState.UNREACHABLE: _BAD,
    EngineState.QUARANTINED: _BAD,
    EngineState.CONTESTED: _BAD,
}


def versions_table(versions: Iterable[Version]) -> Table:
    """Versions, one a line."""
    table = Table("VERSION", "STEP", "STATE", "SIZE", "ENGINES", "SEEN", right={"STEP", "SIZE"}, words="WHY")
    for version in versions:
        table.add_row(
            _text(version.id),
            str(version.step),
            version_state(version),
            size(version.bytes),
            engines_on(version),
            when(version.created_at),
            words=_text(why(version)),
        )
    return table


def when(instant: str) -> str:
    """Month, day and time of an instant in UTC, which are enough for people. JSON has the whole."""
    return clean(instant)[5:19].replace("T", " ") + "Z"


def why(version: Version) -> str | None:
    """Why it is where it is. What a rollback barred has no reason of its own, or one from before."""
    if not _is_barred(version):
        return version.reason
    if version.state is VersionState.SEALED or version.reason is None:
        return f"barred: {version.reason or 'rolled back from'}"
    return f"{version.reason}; barred: rolled back from"


def _is_barred(version: Version) -> bool:
    """Whether that says something: no engine goes to a rejected version in any case, and none was there before, but for
    one that engines took from memory.
    """
    return version.barred and (version.state is not VersionState.REJECTED or version.in_memory)


def version_state(version: Version) -> Text:
    """The state, with what a person did to the version, and whether it has no files."""
    style = _VERSION_STYLES[version.state]
    text = Text(version.state, style=_OVER if version.barred and style == _GOOD else style)
    words = (("pinned", version.pinned), ("barred", _is_barred(version)), ("in memory", version.in_memory))
    for word in [word for word, said in words if said]:
        text.append(f" {word}", style="cyan")
    return text


def engines_on(version: Version) -> str:
    """How many engines of the run serve the version, of how many. One that does not answer does not."""
    if not version.engines:
        return NOTHING
    return f"{sum(engine.serves for engine in version.engines)}/{len(version.engines)}"


def told_of(engine: EngineOnVersion) -> str:
    """Its state, and why."""
    return f"{engine.id} is {engine.state}" + (f" ({engine.reason})" if engine.reason else "")


def engines_table(engines: Iterable[Engine], targets: Mapping[str, Version], now: str | None = None) -> Table:
    """Engines, one a line. `targets` maps runs to the versions that their engines should serve; `now` is an instant."""
    engines = list(engines)
    # An engine that was given no name is called by its address: to say that twice leaves no room for the reason.
    urls = any(_address(engine) != engine.id for engine in engines)
    looked = any(engine.plugin or engine.stock_reason for engine in engines)
    loads = ("LOADS",) if looked else ()
    columns = ("ENGINE", *(("URL",) if urls else ()), "RUN", "STATE", "STEP", "BEHIND", *loads)
    table = Table(*columns, right={"STEP", "BEHIND"}, words="WHY")
    for engine in engines:
        table.add_row(
            _text(engine.id),
            *((_text(None if _address(engine) == engine.id else engine.url),) if urls else ()),
            _text(engine.run),
            engine_state(engine),
            step(engine),
            steps_behind(engine, targets.get(engine.run or "")),
            *((how_it_loads(engine),) if looked else ()),
            words=_text(why_there(engine, now)),
        )
    return table


def step(engine: Engine, shown: str = "{}") -> str:
    """What an engine serves. Before anything was published that is what it was started with."""
    if engine.step is not None:
        return shown.format(engine.step)
    return "start-up" if engine.state is EngineState.IN_SYNC else NOTHING


def why_there(engine: Engine, now: str | None) -> str | None:
    """Why an engine is where it is; of one that does not answer also since when, and at the instant `now` how long."""
    if engine.unreachable_since is None:
        is_new = engine.state is EngineState.IN_SYNC and engine.version is None
        return engine.reason or ("no version to serve yet" if is_new else through_loader(engine))
    since = f"since {engine.unreachable_since[11:16]}Z"
    if now is not None:
        away = datetime.fromisoformat(now) - datetime.fromisoformat(engine.unreachable_since)
        since += f" ({spoken(away.total_seconds())})"
    known = f"{engine.url} cannot be reached: "  # the row has said that it is this one
    told = (engine.reason or "").removeprefix(known)
    return f"{since}: {told}" if told else since


# What these serve has not been seen yet, or was loaded by another writer.
_NOT_OURS = frozenset({EngineState.PROBING, EngineState.UNREACHABLE, EngineState.CONTESTED})


def _address(engine: Engine) -> str:
    return engine.url.partition("://")[2]


def engine_state(engine: Engine) -> Text:
    """The state, whether generation stands still, and whether what it serves has no files."""
    text = Text(engine.state, style=_ENGINE_STYLES[engine.state])
    if engine.in_memory:
        text.append(" in memory", style="cyan")
    return text.append(" paused", style=_BAD) if engine.paused else text


def how_it_loads(engine: Engine) -> str:
    """Who carries out its loads. Why it is not the plugin, `refitd explain` says."""
    if engine.plugin is None:
        return "stock"
    return "loader" if engine.loads_whole else "plugin"


def through_loader(engine: Engine) -> str | None:
    """That its plugin loads all by SGLang's loader, which is slow, and why."""
    return f"each load goes through SGLang's loader: {engine.through_loader}" if engine.loads_whole else None


def steps_behind(engine: Engine, target: Version | None) -> str:
    """How stale an engine is, in steps of the trainer. Steps of different generations cannot be compared."""
    if target is None:
        return NOTHING
    if engine.version == target.id:
        return "0"
    if engine.step is None:
        if not engine.known:
            return "unknown contents"
        return NOTHING if engine.state in _NOT_OURS else "start-up weights"
    served = parse_version_id(engine.version or "")
    if served is not None and served[0] != target.run:
        return "other run"
    if served is not None and served[1].generation != target.generation:
        return "other generation"
    behind = target.step - engine.step
    return str(behind) if behind >= 0 else f"{-behind} ahead"


def reclaim_table(plan: ReclaimPlan) -> Table:
    """What goes and what stays, and why."""
    table = Table("", "PATH", "SIZE", right={"SIZE"}, words="WHY")
    verb = "deleted" if plan.done else "delete"
    for item in sorted(plan.items, key=lambda item: (item.keep, item.path)):
        word = Text("keep", style=_GOOD) if item.keep else Text(verb, style=_BAD)
        table.add_row(word, _text(_short(item.path)), size(item.bytes), words=_text("; ".join(item.reasons)))
    return table


def _short(path: str) -> str:
    """A path without the tails of its long hexadecimal names, which only machines read: JSON has the whole."""
    return _HASH.sub(r"\1…", path)


def reclaim_summary(plan: ReclaimPlan) -> Text:
    """The plan in one line."""
    count = sum(not item.keep for item in plan.items)
    kept = len(plan.items) - count
    would = "freed" if plan.done else "would be freed"
    text = f"{size(plan.freed_bytes)} {would}: {count} to delete, {kept} to keep, {size(plan.kept_bytes)}"
    if plan.disk_budget is not None:
        text += f" of a disk budget of {size(plan.disk_budget)}"
    if plan.foreign_bytes:
        text += f"; {size(plan.foreign_bytes)} are not refitd's to delete"
    return Text(text, style="bold")


_DELIVERY_STYLES: Mapping[DeliveryState, str] = {
    DeliveryState.WAITING: _BUSY,
    DeliveryState.DELIVERED: _GOOD,
    DeliveryState.GIVEN_UP: _BAD,
}


def deliveries_table(deliveries: Iterable[Delivery]) -> Table:
    """Webhooks, one a line."""
    table = Table("WHEN", "WHAT", "ABOUT", "TO", "STATE", "TRIES", right={"TRIES"}, words="WHY")
    for each in deliveries:
        state = Text(each.state, style=_DELIVERY_STYLES[each.state])
        table.add_row(
            when(each.created_at),
            _text(each.topic),
            _text(each.about),
            _text(each.to),
            state,
            str(each.tries),
            words=_text(each.reason),
        )
    return table


def explanation(explained: Explanation) -> Text:
    """Sentences, the most important first."""
    return Text("\n").join(_text(sentence) for sentence in explained.sentences)


def outcome(result: WaitResult) -> Text:
    """How a wait ended well."""
    version = result.version
    match result.outcome:
        case WaitOutcome.SERVED:
            away = "".join(f"; {told_of(engine)}" for engine in version.engines if not engine.serves)
            told = f"is served by {engines_on(version)} engines{away}"
        case WaitOutcome.SUPERSEDED:
            told = "was overtaken: engines serve, or are brought to, something newer"
        case WaitOutcome.SEALED | WaitOutcome.TAKEN | WaitOutcome.PENDING | WaitOutcome.FAILED:
            told = f"is {version.state}"
        case _:
            assert_never(result.outcome)
    return sentence(f"{version.id} {told}.")


def size(count: int | None) -> str:
    """Bytes for people; a dash where they are not known."""
    return NOTHING if count is None else size_of(count)


def sentence(text: str, style: str = "") -> Text:
    """A line of text that may hold what others wrote."""
    return Text(clean(text), style=style)


def _text(text: str | None) -> Text:
    return Text(clean(text) if text else NOTHING)
