"""The service: its settings, secret files, journal and lock; and what it answers at its URL.

It is sent a notice of a version that does not exist, in the root by its name: the service checks the token first, then
the name, and then refuses the notice because nothing is at its path. It writes nothing of that into its log
(`refitd.catalog.intake`). Processes of this host show whose service it is: the one that listens at the URL, and the
one that holds the root's lock. Then it is asked for its engines and its own faults: it knows engines that are not on
doctor's command line, has keys that doctor may lack, and sees the engines from its own host.
"""

import asyncio
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address

import msgspec

from refitd.api.options import LOOPBACK
from refitd.catalog.intake import DOCTORS_RUN
from refitd.engine.http import OVERVIEW_BYTES, NoReply, Reply, Transport
from refitd.settings import Settings
from refitd.state.journal.recovery import FORGOTTEN, Corrupt, Missing, Newer, Older, Sound, UnreadableJournal
from refitd.state.journal.schema import SCHEMA_VERSION
from refitd_client.contract.plugin import setting_fault
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Engine, Faults, Overview, RunGlance
from refitd_client.http.publisher_client import root_name
from refitd_doctor.engines import ASIDE_FIX, LOADS_WHOLE_FIX, loads_whole
from refitd_doctor.finding import CheckName, CheckVerdict, Finding, failed, good, unknown, warning
from refitd_doctor.journal import JournalFacts
from refitd_doctor.preflight import faults_of
from refitd_doctor.processes import Listeners, is_service

SERVICE_SECONDS = 5.0
_ROUTE = "/v1/versions"
_OVERVIEW = "/v1/overview"
_ADDRESS = "name its address: --url or REFITD_URL, or --host and --port"
# Warnings: some are over by themselves a moment after a start. Doctor's own checks say what keeps a job from running.
_OF_FAULTS: Mapping[str, tuple[CheckName, str]] = {
    "root": (CheckName.ROOT, "wait for the first listing after a start; else mount the root again"),
    "engines": (CheckName.ENGINES, "mend the engines file, or the place of --discover"),
    "journal": (
        CheckName.JOURNAL,
        "make room on the disk of the state folder; one that is being rebuilt needs nothing",
    ),
    "disk": (CheckName.SPACE, "unpin versions, close runs that have ended, or raise --disk-budget"),
    "folders": (CheckName.ROOT, "remove folders that are no versions, and close runs that have ended"),
    "upstream": (CheckName.UPSTREAM, "do what the sentence says; else start the upstream, or name another (--follow)"),
    "tls": (
        CheckName.SETTINGS,
        "replace the files of --tls-cert, --tls-key, --tls-client-ca: no restart is needed",
    ),
    "push": (CheckName.STORE, "mend what the sentence names; refitd doctor tries the object store"),
}


def judge_service(settings: Settings, journal: JournalFacts, running: str | None) -> Iterator[Finding]:
    """Judge settings, secret files, journal and lock.

    Args:
        running: the process that holds the root's lock; None where none does.
    """
    yield from judge_settings(settings)
    yield from _secret_files(settings)
    if settings.tokens().write:
        yield good(CheckName.SERVICE, "service", "changes need a token")
    elif settings.host in LOOPBACK:
        yield good(CheckName.SERVICE, "service", "no token: it listens on loopback only")
    yield _journal(journal)
    root = str(settings.root)
    if running is not None:
        yield good(CheckName.SERVICE, root, f"a service runs on this root ({running})")
    else:  # before a start that is as it should be
        text = "no service runs on this root: engines are brought to nothing new"
        yield warning(CheckName.SERVICE, root, text, f"'refitd serve --root {shlex.quote(root)}' starts one")


def judge_settings(settings: Settings) -> Iterator[Finding]:
    """Return the faults for which a start would be refused."""
    fix = "'refitd serve' does not start with it: correct this setting"
    for fault in faults_of(settings):
        yield failed(CheckName.SETTINGS, "service", fault, fix)


def _secret_files(settings: Settings) -> Iterator[Finding]:
    """Files that hold a token or a key."""
    tokens = (
        settings.token_file,
        settings.read_token_file,
        settings.followers_token_file,
    )
    keys = (settings.engine_key_file, settings.engine_admin_key_file)
    keys = (*keys, settings.tls_key, settings.client_key)
    for file in (*tokens, *keys):
        if file is None:
            continue
        try:
            mode = stat.S_IMODE(os.stat(file).st_mode)  # noqa: PTH116 - as the path is, links followed
        except OSError:
            continue  # a key's file may come later; one that cannot be read is reported where it is used
        if mode & stat.S_IROTH:
            yield warning(CheckName.SETTINGS, str(file), f"every user can read it (mode {mode:o})", f"chmod 640 {file}")


def _journal(journal: JournalFacts) -> Finding:
    subject = str(journal.path)
    match journal.condition:
        case Sound(origin=origin):
            text = f"it was begun anew, and a service that runs rebuilds it: {origin.cause}; {FORGOTTEN}"
            fix = "run the service: until then nothing is collected"
            is_whole = good(CheckName.JOURNAL, subject, "can be read to its end")
            return is_whole if origin.rebuilt else warning(CheckName.JOURNAL, subject, text, fix)
        case Missing() if journal.last_folder is None:
            return good(CheckName.JOURNAL, subject, "there is none yet: the service begins it")
        case Missing() if journal.elsewhere:
            text = f"there is none, and the root's last one lies in {journal.last_folder}"
            return warning(CheckName.JOURNAL, subject, text, "name that one with --state")
        case Missing():
            text = f"there is none, and a service has run on this root before: the next start begins one; {FORGOTTEN}"
            return warning(CheckName.JOURNAL, subject, text, "is --state right? Else start the service")
        case Older(schema=schema):
            text = f"an earlier refitd wrote it: the next start moves it aside and begins one; {FORGOTTEN}"
            return warning(CheckName.JOURNAL, subject, text, f"to keep it, go on with that refitd (schema {schema})")
        case Newer(schema=schema):
            text = f"a later refitd wrote it (schema {schema}, and this one knows {SCHEMA_VERSION})"
            fix = "run that refitd"
        case Corrupt(reason=reason) if journal.is_shared:
            text, fix = f"it is corrupt: {reason}", "restore the database from its backup; without one give the group "
            fix += f"an empty database, and delete the root's note of this one; {FORGOTTEN}"
        case Corrupt(reason=reason):
            text, fix = f"it is corrupt: {reason}", "restore it from a backup; or start the service again: it moves it "
            fix += f"aside and begins one; {FORGOTTEN}"
        case UnreadableJournal(reason=reason):
            text, fix = f"it cannot be read: {reason}", f"see who holds {journal.path} and who may read it"
    return failed(CheckName.JOURNAL, subject, text, fix)


def url_of(settings: Settings) -> str:
    """Where a service with these settings answers. One that listens on every address listens on loopback too."""
    host, scheme = settings.host, "http" if settings.tls_cert is None else "https"
    try:
        at = ip_address(host)
    except ValueError:
        return f"{scheme}://{host}:{settings.port}"
    if at.is_unspecified:
        host = "127.0.0.1" if at.version == 4 else "::1"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


def service_at(url: str, token: str | None) -> Transport:
    return Transport(url, api_key=token, admin_key=None, server="service")


def service_of_other_root(url: str, running: str | None, here: Listeners) -> Finding | None:
    """Find a service of another root that listens at the URL on this host. `running` holds the lock of this root."""
    number = (running or "").removeprefix("pid ")
    there, owner = here.at(url), int(number) if number.isdigit() else None
    if there is None or there == owner or not is_service(there):
        return None
    if running is not None and (owner is None or not is_service(owner)):
        return None  # a process of another host or container, whose number says nothing here
    whose = "none runs on this root" if running is None else f"{running} is the one of this root"
    return failed(
        CheckName.SERVICE,
        url,
        f"the service that listens there (pid {there}) is of another root: {whose}",
        "it would never find what is published here: name its --root, or the --port of this root's service",
    )


async def ask_service(settings: Settings, url: str) -> Reply | NoReply:
    """Send it a notice that it refuses."""
    token = next(iter(settings.tokens().write), None)
    notice = {"run": DOCTORS_RUN, "step": 0, "root": await asyncio.to_thread(root_name, settings.root.resolve())}
    return await service_at(url, token).post(_ROUTE, notice, SERVICE_SECONDS)


def is_of_other_root(reply: Reply) -> bool:
    """Whether the service that answered a notice is of another root."""
    return str((reply.data or {}).get("type", "")).endswith(":other-root")


def judge_notice(subject: str, reply: Reply | NoReply) -> Finding:
    """What the answer means. `subject` is the service's URL."""
    if isinstance(reply, NoReply):
        text = f"the service does not answer: {reply.reason}"
        fix = f"start it with 'refitd serve', or {_ADDRESS}"
        return unknown(CheckName.SERVICE, subject, text, fix)
    kind = str((reply.data or {}).get("type", ""))
    if is_of_other_root(reply):
        text = f"the service there is of another root: {(reply.data or {}).get('detail', '')}"
        fix = "name its --root, or the --port of this root's service"
        return failed(CheckName.SERVICE, subject, text, fix)
    if kind.endswith(":run-followed"):
        return good(CheckName.SERVICE, subject, "the service follows an upstream, so it takes notices from no trainer")
    if reply.is_incomplete or kind.endswith(":run-not-followed"):
        return good(CheckName.SERVICE, subject, "the service takes notices with this token, or without one")
    if reply.is_unauthorised:
        text = f"the service does not take this token for changes ({reply.status})"
        fix = "give trainers the token of its --token-file: notices are refused without it"
    else:
        text, fix = f"{_ROUTE} was answered with {reply.status}", f"is this refitd? Else {_ADDRESS}"
    return failed(CheckName.SERVICE, subject, text, fix)


async def ask_overview(settings: Settings, url: str) -> Overview | Finding:
    """Return what the service says of its engines and of itself, or why it does not."""
    tokens = settings.tokens()
    token = next(iter([*tokens.read, *tokens.write]), None)
    reply = await service_at(url, token).get(_OVERVIEW, SERVICE_SECONDS, most=OVERVIEW_BYTES)
    try:
        if isinstance(reply, Reply) and reply.ok:
            return reply.read_as(Overview)
        why = reply.reason if isinstance(reply, NoReply) else f"{_OVERVIEW} was answered with {reply.status}"
    except msgspec.ValidationError as error:
        why = f"{_OVERVIEW} was answered with something else: {error}"
    return unknown(
        CheckName.ENGINES,
        url,
        f"the service does not say what its engines are: {why}",
        "give doctor a token of its --token-file or --read-token-file, and run the same refitd here and there",
    )


def judge_faults(faults: Faults) -> Iterator[Finding]:
    for part, fault in asdict(faults).items():
        if fault is not None:
            check, fix = _OF_FAULTS[part]
            yield warning(check, "service", f"the service says: {fault}", fix)


def judge_service_engines(engines: Sequence[Engine]) -> Iterator[Finding]:
    for engine in engines:
        text = f"the service says {engine.state}{_why(engine)}; {_serving(engine)}; {_loads(engine)}"
        verdict, fix = _verdict(engine)
        if fix is None:
            yield good(CheckName.ENGINES, engine.id, text)
        else:
            yield Finding(CheckName.ENGINES, engine.id, verdict, text, fix)


def judge_runs(runs: Sequence[RunGlance]) -> Iterator[Finding]:
    """Name the runs in which something has failed: a version that was rejected is no engine's fault."""
    for run in runs:
        if run.trouble is not None:
            text = f"the service says: {run.trouble}"
            fix = f"'refitd explain {run.run}' says what was decided, and why"
            yield warning(CheckName.VERSIONS, run.run, text, fix)


def _verdict(engine: Engine) -> tuple[CheckVerdict, str | None]:
    match engine.state:
        case EngineState.UNREACHABLE:
            return CheckVerdict.FAILED, "start it, or mend the way to it: the service brings it to its target by itself"
        case EngineState.QUARANTINED:
            return CheckVerdict.FAILED, f"see its log, then restart it, or 'refitd engines resync {engine.id}'"
        case EngineState.CONTESTED if engine.host is not None:
            return CheckVerdict.FAILED, "do at this service what the sentence says: the host obeys then by itself"
        case EngineState.CONTESTED:
            fix = "stop the other service, trainer or script that loads it, or take one of its two names out"
            return CheckVerdict.FAILED, f"{fix}; then 'refitd engines resync {engine.id}'"
        case EngineState.TAINTED | EngineState.NACKED:
            return CheckVerdict.WARNING, f"'refitd explain {engine.id}' says what was tried, and what comes next"
        case _ if engine.host is not None and engine.host.shares_name:
            return CheckVerdict.FAILED, "start one of the two with another --follower: the later one is led until then"
        case _ if engine.host is not None and engine.host.unknown is not None:
            return CheckVerdict.WARNING, "do at this service what the sentence says, or restore its root and journal"
        case _ if setting_fault(engine.stock_reason) is not None:
            return CheckVerdict.FAILED, ASIDE_FIX
        case _ if engine.loads_whole:
            return CheckVerdict.WARNING, LOADS_WHOLE_FIX
        case _:
            return CheckVerdict.OK, None


def _why(engine: Engine) -> str:
    return "" if engine.reason is None else f" ({engine.reason})"


def _serving(engine: Engine) -> str:
    if engine.run is None:
        return "it follows no run"
    return f"it follows run {engine.run} and " + (
        "serves no version of it" if engine.version is None else f"is on {engine.version}"
    )


def _loads(engine: Engine) -> str:
    server = engine.server or "SGLang"  # the only one that a service knew which does not say it
    proof = "" if engine.proof is None else f"; proof of what it serves: {engine.proof}"
    if engine.plugin is not None:
        how = f", {loads_whole(server)}: {engine.through_loader}" if engine.loads_whole else ""
        return f"refitd's plugin {engine.plugin} carries out its loads{how}{proof}"
    if engine.stock_reason is None and engine.server is None:
        return f"who carries out its loads is not known yet{proof}"
    why = "" if engine.stock_reason is None else f": {engine.stock_reason}"
    return f"its loads are {server}'s own{why}{proof}"


def judge_group(settings: Settings) -> Iterator[Finding]:
    """Ask the database. Blocks, for seconds where it does not answer."""
    database = settings.database
    if database is None:
        return
    # Here, because the driver is an extra.
    import psycopg

    from refitd.state.journal.postgres import look_at_group

    try:
        leader, why = look_at_group(database)
    except psycopg.Error as error:
        text = f"it does not answer: {' '.join(str(error).split())}"
        yield failed(CheckName.JOURNAL, database.shown, text, "see to the database, its address and its password")
        return
    if why is not None:
        yield failed(CheckName.JOURNAL, database.shown, why, "name another database with --state")
    elif leader is None:
        yield good(CheckName.JOURNAL, database.shown, "no service has led yet: the first that starts does")
    elif leader.released:
        text = f"no service leads: {leader.address} gave the lead back (epoch {leader.epoch})"
        yield warning(CheckName.JOURNAL, database.shown, text, "start a service of the group")
    else:
        text = f"{leader.address} leads, or led last, since {leader.since} (epoch {leader.epoch})"
        yield good(CheckName.JOURNAL, database.shown, text)
