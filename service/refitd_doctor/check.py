"""The whole of doctor: look, ask, judge."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.http import NoReply
from refitd.engine.port import Unreached
from refitd.settings import Settings
from refitd_client.contract.wire import Keeping
from refitd_doctor.engines import (
    EngineAnswers,
    ask_engines,
    ask_places,
    judge_engine,
    judge_hugging_face,
    judge_names,
    judge_places,
    judge_sharing,
    judge_start_up_model,
    judge_variables_inside,
    roster_of,
    sighting,
)
from refitd_doctor.finding import CheckName, CheckVerdict, Finding, failed, warning
from refitd_doctor.journal import JournalFacts, judge_durability, read_journal, still
from refitd_doctor.preflight import judge_variables
from refitd_doctor.processes import Listeners, LocalProcess
from refitd_doctor.root import (
    Nonce,
    ReadProgress,
    RootUnusableError,
    judge_mark,
    judge_root,
    look_at_root,
    probed,
    read_versions,
    take_root,
)
from refitd_doctor.service import (
    ask_overview,
    ask_service,
    is_of_other_root,
    judge_faults,
    judge_group,
    judge_notice,
    judge_runs,
    judge_service,
    judge_service_engines,
    judge_settings,
    service_of_other_root,
    url_of,
)
from refitd_doctor.stores import ask_hubs, ask_stores, judge_hub, judge_store
from refitd_hosts.discovery import EnginesFound


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    root: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether something has to be corrected before a job can run."""
        return any(finding.verdict is CheckVerdict.FAILED for finding in self.findings)


async def check(
    settings: Settings,
    *,
    url: str | None = None,
    deep: bool = False,
    repair: bool = False,
    progress: ReadProgress | None = None,
) -> DoctorReport:
    """Check everything.

    Args:
        settings: those of the service.
        url: where the service is; None where the settings say it.
        deep: read every byte of every good version.
        repair: mend first what a service does not mend by itself.
        progress: shows what is read.

    Raises:
        OSError, ValueError: the engines file, the token file or the lock cannot be used.
    """
    root = settings.root.resolve()
    try:
        with probed(root) as nonce:
            findings, journal = await _journal(settings, root, repair=repair)
            findings += await _check(settings, root, nonce, journal, url=url)
            if deep:
                findings += await read_versions(root, journal.versions.values(), progress)
    except RootUnusableError as error:
        unusable = failed(CheckName.ROOT, str(root), str(error), error.fix)
        findings = [unusable, *await _without_root(settings)]
    return DoctorReport(root=str(root), findings=(*findings, *judge_variables(os.environ)))


async def _journal(settings: Settings, root: Path, *, repair: bool) -> tuple[list[Finding], JournalFacts]:
    """What was repaired, or could not be; and the journal after that."""
    journal = await asyncio.to_thread(read_journal, settings, root)
    if not repair:
        return [], journal
    mended = await asyncio.to_thread(lambda: list(take_root(root, journal)))
    return mended, await asyncio.to_thread(read_journal, settings, root)


async def _check(
    settings: Settings,
    root: Path,
    nonce: Nonce,
    journal: JournalFacts,
    *,
    url: str | None,
) -> list[Finding]:
    facts = await asyncio.to_thread(look_at_root, root, nonce, None if settings.lora else settings.base_model)
    with still(root) as running:
        pass  # no longer: a service that starts while the lock is held is refused
    answers = await ask_places(settings)
    found = {url for answer in answers if isinstance(answer, EnginesFound) for url in answer.urls}
    asked = await ask_engines(roster_of(settings, journal.engines, found))
    here = Listeners()
    processes = {one.name: await asyncio.to_thread(here.engine_at, one.spec.url) for one in asked}
    told, keeps = await _ask_service(settings, here, running, url)
    findings = [*judge_root(facts, settings, keeps), *await asyncio.to_thread(list, judge_mark(root, journal))]
    findings += judge_service(settings, journal, running)
    if settings.database is not None:
        findings += await asyncio.to_thread(lambda: list(judge_group(settings)))
    findings += [*judge_durability(journal, settings.push), *told, *judge_places(answers)]
    findings += [finding for asked in await ask_stores(settings) for finding in judge_store(asked)]
    findings += [finding for hub in await ask_hubs(settings) for finding in judge_hub(hub, settings.run)]
    findings += [] if any(finding.check is CheckName.ENGINES for finding in told) else _no_engines(asked)
    findings += judge_names(asked)
    for one in asked:
        findings += await asyncio.to_thread(_of_engine, nonce, one, processes[one.name], journal)
        if settings.base_model is None:
            findings += await asyncio.to_thread(list, judge_start_up_model(one))
    return findings


async def _ask_service(
    settings: Settings, here: Listeners, running: str | None, named: str | None
) -> tuple[list[Finding], Keeping | None]:
    """What the service answers: whether it takes the token, what it says of its engines, and what it keeps.

    Args:
        settings: with its address, if no other is named.
        here: what listens on this host.
        running: who holds the root's lock; None where that is no process, or none on a host whose locks are seen here.
        named: its URL, by --url or REFITD_URL; it is asked there even if no lock shows that it runs.
    """
    url = url_of(settings) if named is None else named
    stranger = await asyncio.to_thread(service_of_other_root, url, running, here)
    if stranger is not None:
        return [stranger], None
    if running is None and named is None:
        return [], None
    reply = await ask_service(settings, url)
    notice = judge_notice(url, reply)
    if isinstance(reply, NoReply) or is_of_other_root(reply):
        return [notice], None
    overview = await ask_overview(settings, url)
    if isinstance(overview, Finding):
        return [notice, overview], None
    engines, runs = judge_service_engines(overview.engines), judge_runs(overview.runs)
    return [notice, *engines, *runs, *judge_faults(overview.faults)], overview.keeps


async def _without_root(settings: Settings) -> list[Finding]:
    """Without a root only the settings and the engines can be checked."""
    asked = await ask_engines(roster_of(settings, {}, set()))
    return [
        *judge_settings(settings),
        *_no_engines(asked),
        *judge_names(asked),
        *(each for one in asked for each in judge_engine(one)),
    ]


def _of_engine(
    nonce: Nonce, asked: EngineAnswers, process: LocalProcess | None, journal: JournalFacts
) -> list[Finding]:
    if isinstance(asked.seen, Unreached) or asked.seen.pulls:  # a host reads its own root, and loads nothing itself
        return list(judge_engine(asked))
    found = sighting(nonce, asked, process, journal.engines.get(asked.name))
    inside = judge_variables_inside(asked, process, nonce)
    return [*judge_engine(asked), *inside, judge_sharing(asked, nonce, found), judge_hugging_face(asked.name, process)]


def _no_engines(asked: list[EngineAnswers]) -> Iterator[Finding]:
    if not asked:
        yield warning(CheckName.ENGINES, "service", "no engine is named", "--engine URL, --engines-file or --discover")
