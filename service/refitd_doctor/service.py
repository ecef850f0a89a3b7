"""The service: its settings, files of secrets, and what it answers at its URL.

It is sent a notice of a version that does not exist, in the root by its name: the service checks the token first, then
the name, and then refuses the notice because nothing is at its path. It writes nothing of that into its log
(`refitd.catalog.intake`). Then it is asked what it says of its runs, engines and itself.
"""

import asyncio
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

import msgspec

from refitd.api.options import LOOPBACK
from refitd.catalog.intake import DOCTORS_RUN
from refitd.engine.http import OVERVIEW_BYTES, NoReply, Reply, Transport
from refitd.preflight import faults_of, unread
from refitd.settings import Settings
from refitd_client.contract.states import EngineGlance
from refitd_client.contract.wire import Overview
from refitd_client.http.publisher_client import root_name
from refitd_doctor.finding import CheckName, Finding, failed, good, unknown, warning

SERVICE_SECONDS = 5.0
_ROUTE = "/v1/versions"
_OVERVIEW = "/v1/overview"
_ADDRESS = "name its address: --url or REFITD_URL, or --host and --port"


def judge_settings(settings: Settings) -> Iterator[Finding]:
    """What a start would refuse, files of secrets that every user can read, and whether changes need a token."""
    fix = "'refitd serve' does not start with it: correct this setting"
    for fault in faults_of(settings):
        yield failed(CheckName.SETTINGS, "service", fault, fix)
    secrets = (
        *(settings.token_file, settings.read_token_file, settings.followers_token_file),
        *(settings.engine_key_file, settings.engine_admin_key_file, settings.tls_key, settings.client_key),
    )
    for file in filter(None, secrets):
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
        except OSError:
            continue  # a key's file may come later; one that cannot be read is reported where it is used
        if mode & stat.S_IROTH:
            yield warning(CheckName.SETTINGS, str(file), f"every user can read it (mode {mode:o})", f"chmod 640 {file}")
    if settings.tokens().write:
        yield good(CheckName.SERVICE, "service", "changes need a token")
    elif settings.host in LOOPBACK:
        yield good(CheckName.SERVICE, "service", "no token: it listens on loopback only")


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


async def ask_service(settings: Settings, url: str) -> Reply | NoReply:
    """Send it a notice that it refuses."""
    token = next(iter(settings.tokens().write), None)
    notice = {"run": DOCTORS_RUN, "step": 0, "root": await asyncio.to_thread(root_name, settings.root.resolve())}
    return await service_at(url, token).post(_ROUTE, notice, SERVICE_SECONDS)


def is_of_other_root(reply: Reply) -> bool:
    return str((reply.data or {}).get("type", "")).endswith(":other-root")


def judge_notice(subject: str, reply: Reply | NoReply) -> Finding:
    """What the answer means. `subject` is the service's URL."""
    check = CheckName.SERVICE
    if isinstance(reply, NoReply):
        text = f"the service does not answer: {reply.reason}"
        return unknown(check, subject, text, f"start it with 'refitd serve', or {_ADDRESS}")
    kind = str((reply.data or {}).get("type", ""))
    if is_of_other_root(reply):
        text = f"the service there is of another root: {(reply.data or {}).get('detail', '')}"
        return failed(check, subject, text, "name its --root, or the --port of this root's service")
    if kind.endswith(":run-followed"):
        return good(check, subject, "the service follows an upstream, so it takes notices from no trainer")
    if reply.is_incomplete or kind.endswith(":run-not-followed"):
        return good(check, subject, "the service takes notices with this token, or without one")
    if reply.is_unauthorised:
        text = f"the service does not take this token for changes ({reply.status})"
        return failed(
            check, subject, text, "give trainers the token of its --token-file: notices are refused without it"
        )
    return failed(check, subject, f"{_ROUTE} was answered with {reply.status}", f"is this refitd? Else {_ADDRESS}")


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


def judge_overview(overview: Overview) -> Iterator[Finding]:
    """What the service says is wrong, in short: `refitd status` and `refitd explain` say it in full.

    Faults are warnings: some are over by themselves a moment after a start.
    """
    for fault in overview.faults.sentences:
        yield warning(CheckName.SERVICE, "service", f"the service says: {fault}", "the runbook says what helps")
    for run in overview.runs:
        if run.trouble is not None:
            fix = f"'refitd explain {run.run}' says what was decided, and why"
            yield warning(CheckName.VERSIONS, run.run, f"the service says: {run.trouble}", fix)
    counts = Counter(engine.state.glance for engine in overview.engines)
    if counts:
        counted = ", ".join(f"{counts[glance]} {glance}" for glance in EngineGlance if counts[glance])
        text = f"the service says of its engines: {counted}"
        is_well = not counts[EngineGlance.TROUBLED] + counts[EngineGlance.AWAY]
        fix = "'refitd engines' says why of each, and 'refitd explain ENGINE' what helps"
        yield good(CheckName.ENGINES, "service", text) if is_well else failed(CheckName.ENGINES, "service", text, fix)


def judge_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What a start says of variables that nothing reads, as findings."""
    for name, meant in unread(environment).items():
        fix = "unset it, or see docs/reference/settings.md for what there is"
        if meant is not None:
            fix = f"did you mean {meant}?"
        yield warning(CheckName.SETTINGS, name, "no setting is called so, and nothing reads it", fix)
