"""The whole of doctor: look, ask, judge."""

import asyncio
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from refitd.engine.http import NoReply
from refitd.settings import Settings, group_of
from refitd_client.contract.wire import Keeping
from refitd_doctor.engines import (
    EngineAnswers,
    ask_engines,
    ask_places,
    judge_engine,
    judge_names,
    judge_places,
    judge_start_up_model,
    roster_of,
)
from refitd_doctor.finding import CheckName, CheckVerdict, Finding, failed, good, warning
from refitd_doctor.journal import JournalFacts, judge_group, judge_journal, read_journal, still
from refitd_doctor.root import (
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
    judge_notice,
    judge_overview,
    judge_settings,
    judge_variables,
    url_of,
)
from refitd_doctor.stores import ask_hubs, ask_stores, judge_hub, judge_store
from refitd_hosts.discovery import EnginesFound
from refitd_hosts.options import GroupSettings


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DoctorReport:
    """Check everything.

    Args:
        settings: those of the service.
        url: where the service is; None where the settings say it.
        deep: read every byte of every good version.
        repair: mend first what a service does not mend by itself.
        progress: gets the bytes that `deep` has read, and of how many.

    Raises:
        OSError, ValueError: the engines file, the token file or the lock cannot be used.
    """
    root = settings.root.resolve()
    findings: list[Finding] = []
    try:
        with probed(root) as probe:
            journal = await asyncio.to_thread(read_journal, settings, root)
            if repair:
                findings += await asyncio.to_thread(lambda: list(take_root(root, journal)))
                journal = await asyncio.to_thread(read_journal, settings, root)
            findings += await _check(settings, root, probe, journal, url=url)
            if deep:
                findings += await read_versions(root, journal.versions.values(), progress)
    except RootUnusableError as error:  # then settings and engines alone can be checked
        findings = [failed(CheckName.ROOT, str(root), str(error), error.fix), *judge_settings(settings)]
        asked = await ask_engines(roster_of(settings, {}))
        findings += [*_no_engines(asked), *judge_names(asked)]
        findings += [found for each in asked for found in judge_engine(each)]
    return DoctorReport(root=str(root), findings=(*findings, *judge_variables(os.environ)))


async def _check(
    settings: Settings, root: Path, probe: Path, journal: JournalFacts, *, url: str | None
) -> list[Finding]:
    facts = await asyncio.to_thread(look_at_root, root, probe, None if settings.lora else settings.base_model)
    with still(root) as running:
        pass  # no longer: a service that starts while the lock is held is refused
    answers = await ask_places(settings)
    found = {url for answer in answers if isinstance(answer, EnginesFound) for url in answer.urls}
    asked = await ask_engines(roster_of(settings, journal.engines, found))
    told, keeps = await _ask_service(settings, running, url)
    findings = [*judge_root(facts, settings, keeps), *await asyncio.to_thread(list, judge_mark(root, journal))]
    findings += [*judge_settings(settings), judge_journal(journal), _running(root, running)]
    database = group_of(settings, GroupSettings).database
    if database is not None:
        findings.append(await asyncio.to_thread(judge_group, database))
    findings += [*told, *judge_places(answers)]
    findings += [each for store in await ask_stores(settings) for each in judge_store(store)]
    findings += [each for hub in await ask_hubs(settings) for each in judge_hub(hub, settings.run)]
    findings += [] if any(finding.check is CheckName.ENGINES for finding in told) else _no_engines(asked)
    findings += judge_names(asked)
    for one in asked:
        findings += judge_engine(one, journal.engines.get(one.name))
        if settings.base_model is None:
            findings += await asyncio.to_thread(list, judge_start_up_model(one))
    return findings


def _running(root: Path, running: str | None) -> Finding:
    """`running`: the process that holds the root's lock; None where that is no process."""
    if running is not None:
        return good(CheckName.SERVICE, str(root), f"a service runs on this root ({running})")
    text = "no service runs on this root: engines are brought to nothing new"  # before a start that is as it should be
    return warning(CheckName.SERVICE, str(root), text, f"'refitd serve --root {shlex.quote(str(root))}' starts one")


async def _ask_service(
    settings: Settings, running: str | None, named: str | None
) -> tuple[list[Finding], Keeping | None]:
    """What the service answers: whether it takes the token, what it says is wrong, and what it keeps.

    Args:
        running: who holds the root's lock; None where that is no process, or none on a host whose locks are seen here.
        named: its URL, by --url or REFITD_URL; it is asked there even if no lock shows that it runs.
    """
    url = url_of(settings) if named is None else named
    reply = await ask_service(settings, url)
    is_other = not isinstance(reply, NoReply) and is_of_other_root(reply)
    if running is None and named is None and not is_other:
        return [], None  # before a start nothing has to answer, and what answers may be no refitd
    notice = judge_notice(url, reply)
    if isinstance(reply, NoReply) or is_other:
        return [notice], None
    overview = await ask_overview(settings, url)
    if isinstance(overview, Finding):
        return [notice, overview], None
    return [notice, *judge_overview(overview)], overview.keeps


def _no_engines(asked: list[EngineAnswers]) -> list[Finding]:
    fix = "--engine URL, --engines-file or --discover"
    return [] if asked else [warning(CheckName.ENGINES, "service", "no engine is named", fix)]
