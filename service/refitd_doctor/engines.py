"""The engines: the places of --discover that name them, each engine's answers, and whether it sees the same files.

A stock SGLang has no route that reads a file and leaves the engine as it was: an update that fails has drained the
requests in flight and changed the path that the engine names. That an engine sees the same files is proved by

    the process    on this host, its own view of the nonce's path (/proc/PID/root)
    the plugin     its socket in the root, when it answers for this engine
    a load         of a version beneath the root, whose contents the service proved

and by nothing else. Without a proof it is unknown before the first load.
"""

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.address import Address, engine_id, host_of, parse_allow_list, refusal
from refitd.engine.port import ChangeCheck, EnginePort, Reached, Unreached
from refitd.engine.registry import KINDS, EngineSpec, connector, parse_engines
from refitd.policy.contest import is_one_server
from refitd.root.handle import RootThreads
from refitd.settings import Settings
from refitd.state.records import EngineRecord, Source
from refitd_client.contract.plugin import ASIDE, setting_fault
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from refitd_doctor.finding import CheckName, CheckVerdict, Finding, failed, good, unknown, warning
from refitd_doctor.preflight import unread
from refitd_doctor.processes import LocalProcess
from refitd_doctor.root import Nonce
from refitd_hosts.discovery import Answer, EnginesFound, Silent, parse_place
from refitd_hosts.discovery.scout import ask
from refitd_inside.client import NO_PLUGIN


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

    def connect(self, name: str) -> EnginePort:
        """The adapter for an engine. Close it afterwards."""
        return connector(self.settings.engine_access, self.guard, self.is_named)(self.specs[name])

    def root_of(self, name: str) -> str:
        return self.specs[name].root or self.settings.path_map or str(self.settings.root.resolve())

    def is_named(self, url: str) -> bool:
        """Whether the engine gets the default keys."""
        return url in self.named

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
        OSError, ValueError: the engines file or a URL cannot be used.
    """
    specs = settings.engine_specs
    if settings.engines_file is not None:
        specs |= {spec.id or engine_id(spec.url): spec for spec in _read_engines_file(settings.engines_file)}
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


def _read_engines_file(file: Path) -> list[EngineSpec]:
    try:
        return parse_engines(file.read_text())
    except ValueError as error:
        raise ValueError(f"the engines file {file} cannot be used: {error}") from error


_OFFLINE = "HF_HUB_OFFLINE"
_TRUE = frozenset({"1", "true", "yes", "on"})
_OF_PLAIN_TOO = " (of checkpoints without refit.json as well)"
_UNTOLD = frozenset({"None", "?"})  # as they stand in a configuration, which is made to be compared
ASIDE_FIX = "mend what it names in the server's environment or command; restart it"
LOADS_WHOLE_FIX = "the runbook's RefitdLoadsThroughLoader says for which models that is so, and what to do about others"


def loads_whole(server: str) -> str:
    """What it means that each load goes through a server's own loader. `server` is what sentences call its kind."""
    return f"each of them through {server}'s loader, which is slow, and refuses deltas"


async def ask_places(settings: Settings) -> list[Answer]:
    threads = RootThreads()
    return await asyncio.gather(*(ask(parse_place(place), threads) for place in settings.discover))


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
        spec: how it was named.
        root: where it sees the root.
        seen: what a probe saw.
        change: whether its key opens changes; only where the probe succeeded.
    """

    name: str
    spec: EngineSpec
    root: str
    seen: Reached | Unreached
    change: ChangeCheck | None = None


async def ask_engines(roster: Roster) -> list[EngineAnswers]:
    return await asyncio.gather(*(_ask(roster, name) for name in sorted(roster.specs)))


async def _ask(roster: Roster, name: str) -> EngineAnswers:
    engine = roster.connect(name)
    try:
        seen = await engine.probe()
        change = await engine.check_changes() if isinstance(seen, Reached) else None
    finally:
        await engine.aclose()
    return EngineAnswers(name=name, spec=roster.specs[name], root=roster.root_of(name), seen=seen, change=change)


def judge_names(asked: Sequence[EngineAnswers]) -> Iterator[Finding]:
    """Whether two of the names lead to one server."""
    for at, one in enumerate(asked):
        for other in asked[:at]:
            if is_one_server(one.seen, other.seen):
                text = (
                    f"{one.spec.url} and {other.spec.url} are one server: the service loads it by one of the two names"
                )
                fix = "take one of the two out of --engine, the engines file or what is discovered"
                yield failed(CheckName.ENGINES, one.name, text, fix)


def judge_engine(asked: EngineAnswers) -> Iterator[Finding]:
    if isinstance(asked.seen, Unreached):
        yield failed(CheckName.ENGINES, asked.name, asked.seen.reason, asked.seen.advice)
        return
    opens = "; the key opens changes" if asked.change is not None and asked.change.fault is None else ""
    yield good(CheckName.ENGINES, asked.name, f"{asked.seen.server} {_started_as(asked.seen)}{opens}")
    yield _plugin(asked.name, asked.seen)
    for each in asked.seen.obstacles:
        judge = failed if each.blocks else warning
        yield judge(CheckName.UPDATES, asked.name, each.text, each.fix)
    if asked.change is not None and asked.change.fault is not None:
        yield failed(CheckName.ENGINES, asked.name, asked.change.fault, asked.change.advice)


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
    if seen.plugin is not None and seen.loader is not None and seen.loader.whole:
        whole = f"{loads_whole(seen.server)}: {seen.loader.reason}"
        text = f"refitd {seen.plugin} inside it carries out its loads{_OF_PLAIN_TOO}, {whole}"
        return warning(CheckName.PLUGIN, name, text, LOADS_WHOLE_FIX)
    if seen.plugin is not None:
        text = f"refitd {seen.plugin} inside it carries out its loads{_OF_PLAIN_TOO}, and takes deltas in place"
        return good(CheckName.PLUGIN, name, text)
    if seen.stock_reason is None:  # none was looked for, as with adapters
        return good(CheckName.PLUGIN, name, f"its loads are {seen.server}'s own")
    if seen.stock_reason == NO_PLUGIN:
        text = f"none speaks for it: its loads are {seen.server}'s own{_OF_PLAIN_TOO}, and deltas reach it as copies"
        return good(CheckName.PLUGIN, name, f"{text}; for updates as transactions, {_inside(seen)}")
    fault = setting_fault(seen.stock_reason)
    if seen.stock_reason.startswith(ASIDE) or fault is not None:
        text = f"refitd is inside it, and yet its loads are {seen.server}'s own{_OF_PLAIN_TOO}: {seen.stock_reason}"
        judge = warning if fault is None else failed
        return judge(CheckName.PLUGIN, name, text, ASIDE_FIX)
    text = f"its loads are {seen.server}'s own{_OF_PLAIN_TOO}, though a plugin may be there: {seen.stock_reason}"
    return warning(CheckName.PLUGIN, name, text, _inside(seen))


def _inside(seen: Reached) -> str:
    return next((kind.inside for kind in KINDS if kind.name == seen.server.lower()), "install refitd beside it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What may prove that an engine sees the same files.

    Attributes:
        looked: whether its process's view of files could be read.
        read: what the process reads at the nonce's path; None for nothing.
        plugin: whether its plugin answers at a socket in the root; None where that is not known.
        loaded: a version that it is proved to have loaded from the root.
    """

    looked: bool
    read: str | None
    plugin: bool | None
    loaded: str | None


def sighting(nonce: Nonce, asked: EngineAnswers, process: LocalProcess | None, known: EngineRecord | None) -> Sighting:
    """Gather what may prove it. Reads one file."""
    path = f"{asked.root}/{nonce.path}"
    return Sighting(
        looked=process is not None and process.can_be_seen,
        read=None if process is None else process.reads(path),
        plugin=plugin_answers(asked),
        loaded=known.serving if known is not None and known.known else None,
    )


def plugin_answers(asked: EngineAnswers) -> bool | None:
    """Whether refitd's plugin inside this engine answers at a socket in the root; None where that is not known.

    The probe has asked (docs/plugin.md: `{"do":"hello"}` over `<root>/.refitd/engines/*.sock`): an answer that names
    the engine's own port and seed comes from a process that has made its socket beneath the very root that we look at.
    """
    return asked.seen.plugin is not None if isinstance(asked.seen, Reached) else None


def judge_sharing(asked: EngineAnswers, nonce: Nonce, found: Sighting) -> Finding:
    """Judge whether the engine sees the same files."""
    if found.read == nonce.text:
        return good(CheckName.FILES, asked.name, f"its process reads a nonce at {asked.root}")
    if found.plugin:
        return good(CheckName.FILES, asked.name, "the plugin inside it answers from a socket in the root")
    if found.looked:
        text = f"its process does not see what was just written beneath {asked.root}"
        fix = "mount the root there, or say where it is: --path-map, or 'root' in the engines file"
        return failed(CheckName.FILES, asked.name, text, fix)
    if found.loaded is not None:
        return good(CheckName.FILES, asked.name, f"it was proved to have loaded {found.loaded} from the root")
    text = "it cannot be proved before the first load: without a plugin an engine cannot say what it sees"
    fix = "run doctor on the engine's host, or install refitd into its environment (the plugin answers)"
    return unknown(CheckName.FILES, asked.name, text, fix)


def judge_variables_inside(asked: EngineAnswers, process: LocalProcess | None, nonce: Nonce) -> Iterator[Finding]:
    """Whether refitd's variables in an engine's environment are called as they should be, and name this root."""
    if process is None or process.environment is None or not isinstance(asked.seen, Reached):
        return
    for name, meant in unread(process.environment).items():
        if meant is not None:
            text = f"{name} stands in its environment, and nothing reads it"
            yield warning(CheckName.PLUGIN, asked.name, text, f"did you mean {meant}?")
    variable = f"REFITD_{asked.seen.server.upper()}_ROOT"
    root = process.environment.get(variable, "").strip()
    if root.startswith("/") and process.can_be_seen and process.reads(f"{root}/{nonce.path}") != nonce.text:
        text = f"{variable} is '{root}', and its process does not see this root there"
        yield failed(CheckName.PLUGIN, asked.name, text, "name the root as the server sees it, and restart the server")


def judge_hugging_face(name: str, process: LocalProcess | None) -> Finding:
    """Whether the engine would ask the Hugging Face hub for a path that is not there."""
    fix = f"start it with {_OFFLINE}=1: a path that is gone has to fail, and never be asked for there"
    if process is None or process.environment is None:
        text = "whether it may ask the Hugging Face hub cannot be seen from here"
        return unknown(CheckName.FILES, name, text, fix)
    if process.environment.get(_OFFLINE, "").lower() in _TRUE:
        return good(CheckName.FILES, name, f"{_OFFLINE} is set")
    return warning(CheckName.FILES, name, f"{_OFFLINE} is not set, so that it may ask the Hugging Face hub", fix)
