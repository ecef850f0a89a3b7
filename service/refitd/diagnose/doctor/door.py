"""Whether the service at an address is that of the root, and takes the token that these settings have.

It is told of a version that there is not, in the root by its name: the token is looked at first, then the name, and
then the notice is refused because nothing is at its path.
Whose service it is, processes of this host tell: who listens there, and who holds the root's lock.
"""

import asyncio
from ipaddress import ip_address

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.doctor.processes import is_service, listener
from refitd.engine.http import NoReply, Reply, Transport
from refitd.settings import Settings
from refitd_client.http.handshake import name_of

CALL_SECONDS = 5.0
_ROUTE = "/v1/versions"
_UNAUTHORISED = frozenset({401, 403})
_INCOMPLETE = frozenset({400, 422})
_ADDRESS = "name its address: --url or REFITD_URL, or --host and --port"


async def ask_service(settings: Settings, url: str) -> Reply | NoReply:
    """Send it a notice that it refuses."""
    token = next(iter(settings.tokens().write), None)
    notice = {"run": "refitd-doctor", "step": 0, "root": await asyncio.to_thread(name_of, settings.root.resolve())}
    return await service_at(url, token).post(_ROUTE, notice, CALL_SECONDS)


def service_at(url: str, token: str | None) -> Transport:
    """Calls to a service."""
    return Transport(url, api_key=token, admin_key=None, server="service")


def url_of(settings: Settings) -> str:
    """Where a service with these settings answers. One that listens on every address listens on loopback too."""
    host = settings.host
    try:
        at = ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if at.is_unspecified:
        host = "127.0.0.1" if at.version == 4 else "::1"
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def stranger_at_door(url: str, running: str | None) -> Finding | None:
    """That a service of another root listens there, as far as this host shows. `running` holds the lock of this one."""
    there, owner = listener(url), _pid_of(running)
    if there is None or there == owner or not is_service(there):
        return None
    if running is not None and (owner is None or not is_service(owner)):
        return None  # a process of another host or container, whose number says nothing here
    whose = "none runs on this root" if running is None else f"{running} is the one of this root"
    return Finding(
        check=Check.LOCK,
        subject=url,
        verdict=Verdict.FAILED,
        text=f"the service that listens there (pid {there}) is of another root: {whose}",
        fix="it would never find what is published here: name its --root, or the --port of this root's service",
    )


def _pid_of(running: str | None) -> int | None:
    number = (running or "").removeprefix("pid ")
    return int(number) if number.isdigit() else None


def judge_door(subject: str, reply: Reply | NoReply) -> Finding:
    """What the answer means. `subject` is the service's URL."""
    if isinstance(reply, NoReply):
        text = f"the service does not answer: {reply.reason}"
        fix = f"start it with 'refitd serve', or {_ADDRESS}"
        return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    kind = str((reply.data or {}).get("type", ""))
    if kind.endswith(":other-root"):
        text = f"the service there is of another root: {(reply.data or {}).get('detail', '')}"
        fix = "name its --root, or the --port of this root's service"
        return Finding(check=Check.LOCK, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
    if reply.status in _INCOMPLETE or kind.endswith(":run-not-followed"):
        return good(Check.TOKEN, subject, "the service takes notices with this token, or without one")
    if reply.status in _UNAUTHORISED:
        text = f"the service does not take this token for changes ({reply.status})"
        fix = "give trainers the token of its --token-file: notices are refused without it"
    else:
        text, fix = f"{_ROUTE} was answered with {reply.status}", f"is this refitd? Else {_ADDRESS}"
    return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
