"""Whether the service at the settings' address is that of the root, and takes the token that these settings have.

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


async def ask_service(settings: Settings) -> Reply | NoReply:
    """Knock, at the address that the settings have."""
    token = next(iter(settings.tokens().write), None)
    notice = {"run": "refitd-doctor", "step": 0, "root": await asyncio.to_thread(name_of, settings.root.resolve())}
    return await Transport(url_of(settings), api_key=token, admin_key=None).post(_ROUTE, notice, CALL_SECONDS)


def url_of(settings: Settings) -> str:
    """Where it answers. One that listens on every address listens on loopback too."""
    host = settings.host
    try:
        at = ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if at.is_unspecified:
        host = "127.0.0.1" if at.version == 4 else "::1"
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def stranger_at_door(settings: Settings, running: str | None) -> Finding | None:
    """That a service of another root listens there, as far as this host shows. `running` holds the lock of this one."""
    there, owner = listener(url_of(settings)), _pid_of(running)
    if there is None or there == owner or not is_service(there):
        return None
    if running is not None and (owner is None or not is_service(owner)):
        return None  # a process of another host or container, whose number says nothing here
    whose = "none runs on this root" if running is None else f"{running} is the one of this root"
    return Finding(
        check=Check.LOCK,
        subject=url_of(settings),
        verdict=Verdict.FAILED,
        text=f"the service that listens there (pid {there}) is of another root: {whose}",
        fix="it would never find what is published here: name its --root, or the --port of this root's service",
    )


def _pid_of(running: str | None) -> int | None:
    number = (running or "").removeprefix("pid ")
    return int(number) if number.isdigit() else None


def judge_door(settings: Settings, reply: Reply | NoReply) -> Finding:
    """What the answer means."""
    subject = url_of(settings)
    if isinstance(reply, NoReply):
        text, fix = f"the service that runs does not answer there: {reply.reason}", "give doctor its --host and --port"
        return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    kind = str((reply.data or {}).get("type", ""))
    if kind.endswith(":other-root"):
        text = f"the service there is of another root: {(reply.data or {}).get('detail', '')}"
        fix = "name its --root, or the --port of this root's service"
        return Finding(check=Check.LOCK, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
    if reply.status in _INCOMPLETE or kind.endswith(":run-not-followed"):
        return good(Check.TOKEN, subject, "the service that runs takes notices with this token, or without one")
    if reply.status in _UNAUTHORISED:
        text = f"the service that runs does not take this token for changes ({reply.status})"
        fix = "give trainers the token of its --token-file: notices are refused without it"
    else:
        text, fix = f"{_ROUTE} was answered with {reply.status}", "is this refitd? give doctor its --host and --port"
    return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
