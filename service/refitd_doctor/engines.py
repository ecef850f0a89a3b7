"""The engines: the places of --discover that name them, each engine's answers, and whether it sees the same files.

A stock SGLang has no route that reads a file and leaves the engine as it was. That an engine sees the same files is
proved by the plugin, which answers at a socket in the root, or by a load of a version beneath the root, whose contents
the service proved. Without a proof it is unknown before the first load.
"""

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.address import Address, engine_id, host_of, parse_allow_list, refusal
from refitd.engine.port import ChangeCheck, Reached, Unreached
from refitd.engine.registry import KINDS, EngineSpec, connector, read_engines
from refitd.policy.contest import is_one_server
from refitd.settings import Settings, group_of
from refitd.state.records import EngineRecord, Source
from refitd_client.contract.plugin import ASIDE, setting_fault
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from refitd_doctor.finding import CheckName, CheckVerdict, Finding, failed, good, unknown, warning
from refitd_hosts.discovery import Answer, EnginesFound, Silent, parse_place
from refitd_hosts.discovery.scout import ask
from refitd_hosts.options import GroupSettings
from refitd_inside.client import NO_PLUGIN

_OF_PLAIN_TOO = " (of checkpoints without refit.json as well)"
_UNTOLD = frozenset({"None", "?"})  # as they stand in a configuration, which is made to be compared
_ASIDE_FIX = "mend what it names in the server's environment or command; restart it"
_LOADER_FIX = "the runbook's RefitdLoadsThroughLoader says for which models that is so, and what to do about others"


@dataclass(frozen=True, slots=True)
class Roster:
    """The engines by id.

    `settled` are the hosts that settings and engines file name; `named` the URLs of the engines that are sent the
    default keys, by the service's own rules (`policy/roster.py`).
    """

    settings: Settings
    specs: Mapping[str, EngineSpec]
    settled: frozenset[str]
    named: frozenset[str]

    def guard(self, host: str, address: Address | None) -> str | None:
        """Return why an address may not be called, by the service's own rules (`policy/roster.py`).

        An allow list goes before the engines file. Keys must not go to a host that DNS or the API has named.
        """
        allowed = parse_allow_list(self.settings.engine_allow)
        said = frozenset(host_of(spec.url) for spec in self.settings.engine_specs.values())
        return refusal(host, address, allowed, said if allowed.is_set else self.settled)


def roster_of(settings: Settings, records: Mapping[str, EngineRecord], found: Collection[str] = ()) -> Roster:
    """Return the engines that there are.

    Args:
        settings: those of the service.
        records: the journal's; engines that were added by the API are nowhere else.
        found: URLs that were discovered just now.

    Raises:
        ValueError: the engines file or a URL cannot be used.
    """
    specs = settings.engine_specs
    if settings.engines_file is not None:
        specs |= {spec.id or engine_id(spec.url): spec for spec in read_engines(settings.engines_file)}
    named = {spec.url for spec in specs.values()}
    settled = frozenset(host_of(url) for spec in specs.values() for url in spec.urls)
    for record in records.values():
        if record.naming.source in {Source.API, Source.DISCOVERED}:
            specs.setdefault(record.id, EngineSpec(url=record.url, id=record.id, run=record.run))
    if settings.engine_allow:
        named |= {*found, *(record.url for record in records.values() if record.naming.source is Source.DISCOVERED)}
    known = {spec.url for spec in specs.values()}
    specs |= {engine_id(url): EngineSpec(url=url) for url in found if url not in known}
    return Roster(settings, specs, settled, frozenset(named))


async def ask_places(settings: Settings) -> list[Answer]:
    return await asyncio.gather(*(ask(parse_place(place)) for place in group_of(settings, GroupSettings).discover))


def judge_places(answers: Iterable[Answer]) -> Iterator[Finding]:
    for answer in answers:
        match answer:
            case EnginesFound(place=place, urls=urls) if urls:
                yield good(CheckName.ENGINES, place, f"names {', '.join(sorted(urls))}")
            case EnginesFound(place=place):
                text, fix = "names no engine", "start engines that it names, or correct --discover"
                yield warning(CheckName.ENGINES, place, text, fix)
            case Silent(place=place, reason=reason):
                fix = "see that it can be reached from here, or correct --discover"
                yield failed(CheckName.ENGINES, place, reason, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswers:
    """What one engine answered.

    Attributes:
        name: its id.
        url: how it was named.
        seen: what a probe saw.
        change: whether its key opens changes; only where the probe succeeded.
    """

    name: str
    url: str
    seen: Reached | Unreached
    change: ChangeCheck | None = None


async def ask_engines(roster: Roster) -> list[EngineAnswers]:
    return await asyncio.gather(*(_ask(roster, name) for name in sorted(roster.specs)))


async def _ask(roster: Roster, name: str) -> EngineAnswers:
    spec = roster.specs[name]
    engine = connector(roster.settings.engine_access, roster.guard, roster.named.__contains__)(spec)
    try:
        seen = await engine.probe()
        change = await engine.check_changes() if isinstance(seen, Reached) else None
    finally:
        await engine.aclose()
    return EngineAnswers(name=name, url=spec.url, seen=seen, change=change)


def judge_names(asked: Sequence[EngineAnswers]) -> Iterator[Finding]:
    """Whether two of the names lead to one server."""
    for at, one in enumerate(asked):
        for other in asked[:at]:
            if is_one_server(one.seen, other.seen):
                text = f"{one.url} and {other.url} are one server: the service loads it by one of the two names"
                fix = "take one of the two out of --engine, the engines file or what is discovered"
                yield failed(CheckName.ENGINES, one.name, text, fix)


def judge_engine(asked: EngineAnswers, known: EngineRecord | None = None) -> Iterator[Finding]:
    """What the engine's answers mean. `known` is what the journal has of it."""
    seen, name = asked.seen, asked.name
    if isinstance(seen, Unreached):
        yield failed(CheckName.ENGINES, name, seen.reason, seen.advice)
        return
    opens = "; the key opens changes" if asked.change is not None and asked.change.fault is None else ""
    yield good(CheckName.ENGINES, name, f"{seen.server} {_started_as(seen)}{opens}")
    yield _plugin(name, seen)
    for each in seen.obstacles:
        judge = failed if each.blocks else warning
        yield judge(CheckName.UPDATES, name, each.text, each.fix)
    if asked.change is not None and asked.change.fault is not None:
        yield failed(CheckName.ENGINES, name, asked.change.fault, asked.change.advice)
    if not seen.pulls:  # a host reads its own root, and loads nothing itself
        yield _sharing(name, seen, known)


def _sharing(name: str, seen: Reached, known: EngineRecord | None) -> Finding:
    """Whether it sees the same files.

    A plugin that names the engine's own port and seed has answered at a socket beneath the very root that we look at
    (docs/plugin.md).
    """
    if seen.plugin is not None:
        return good(CheckName.FILES, name, "the plugin inside it answers from a socket in the root")
    if known is not None and known.known and known.serving is not None:
        return good(CheckName.FILES, name, f"it was proved to have loaded {known.serving} from the root")
    text = "whether it sees this root cannot be proved before the first load: a stock engine cannot say what it sees"
    fix = "publish a version, or install refitd into its environment (the plugin answers)"
    return unknown(CheckName.FILES, name, text, fix)


def judge_start_up_model(asked: EngineAnswers) -> Iterator[Finding]:
    """Whether versions can be held against the model that the engine was started with. Reads the model's headers."""
    path = asked.seen.startup_path if isinstance(asked.seen, Reached) else None
    if path is None:
        return
    fix = "name the same model in a folder that the service's user can read: --base-model DIR"
    try:
        found = read_reference(Path(path))
    except (FileNotFoundError, ReferenceRefusedError) as error:
        verdict, text = CheckVerdict.WARNING, f"without --base-model versions are rejected: {error}"
    except OSError as error:
        verdict = CheckVerdict.FAILED
        text = f"without --base-model no version has a verdict: user id {os.geteuid()} cannot read {path}: {error}"
    else:
        if not found.warnings:
            yield good(CheckName.FILES, asked.name, f"versions are held against {path}")
            return
        verdict, text = CheckVerdict.WARNING, f"versions are held against what is in {path}: {found.warnings[0]}"
    yield Finding(check=CheckName.FILES, subject=asked.name, verdict=verdict, text=text, fix=fix)


def _started_as(seen: Reached) -> str:
    """Its release and how it was started; what the server does not tell is left out."""
    told = seen.configuration.removeprefix(f"{seen.server.lower()} {seen.server_version} ").split()
    return ", ".join(
        [seen.server_version or "of an unknown release", " ".join(word for word in told if word not in _UNTOLD)]
    )


def _plugin(name: str, seen: Reached) -> Finding:
    check = CheckName.PLUGIN
    if seen.plugin is not None:
        text = f"refitd {seen.plugin} inside it carries out its loads{_OF_PLAIN_TOO}"
        if seen.loader is None or not seen.loader.whole:
            return good(check, name, f"{text}, and takes deltas in place")
        slow = f"each of them through {seen.server}'s loader, which is slow, and refuses deltas: {seen.loader.reason}"
        return warning(check, name, f"{text}, {slow}", _LOADER_FIX)
    if seen.stock_reason is None:  # none was looked for, as with adapters
        return good(check, name, f"its loads are {seen.server}'s own")
    inside = next((kind.inside for kind in KINDS if kind.name == seen.server.lower()), "install refitd beside it")
    if seen.stock_reason == NO_PLUGIN:
        text = f"none speaks for it: its loads are {seen.server}'s own{_OF_PLAIN_TOO}, and deltas reach it as copies"
        return good(check, name, f"{text}; for updates as transactions, {inside}")
    fault = setting_fault(seen.stock_reason)
    if seen.stock_reason.startswith(ASIDE) or fault is not None:
        text = f"refitd is inside it, and yet its loads are {seen.server}'s own{_OF_PLAIN_TOO}: {seen.stock_reason}"
        return (warning if fault is None else failed)(check, name, text, _ASIDE_FIX)
    text = f"its loads are {seen.server}'s own{_OF_PLAIN_TOO}, though a plugin may be there: {seen.stock_reason}"
    return warning(check, name, text, inside)
