"""Whether the service at the address of these settings is this root's, and takes the token that they have.

It is told of a version that there is not, in the root by its name: the token is looked at first, then the name, and
then the notice is refused because nothing is at its path.
"""

import asyncio
from ipaddress import ip_address

from refitd.doctor.finding import Check, Finding, Verdict, good
from refitd.engine.sglang.transport import NoReply, Reply, Transport
from refitd.settings import Settings
from refitd_client.known import name_of

CALL_SECONDS = 5.0
_ROUTE = "/v1/versions"
_UNAUTHORISED = frozenset({401, 403})
_INCOMPLETE = frozenset({400, 422})


async def ask_service(settings: Settings) -> Reply | NoReply:
    """Knock, at the address that the settings have."""
    token = next(iter(settings.tokens().write), None)
    name = await asyncio.to_thread(name_of, settings.root.resolve())
    notice = {"run": "refitd-doctor", "step": 0, "root": name}
    return await Transport(_url(settings), api_key=token, admin_key=None).post(_ROUTE, notice, CALL_SECONDS)


def is_refitd(reply: Reply | NoReply) -> bool:
    """Whether a service of refitd's has answered."""
    return isinstance(reply, Reply) and _kind(reply).startswith("urn:refitd:")


def _kind(reply: Reply) -> str:
    return str((reply.data or {}).get("type", ""))


def _url(settings: Settings) -> str:
    """One that listens on every address listens on loopback too."""
    host = settings.host
    try:
        at = ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if at.is_unspecified:
        host = "127.0.0.1" if at.version == 4 else "::1"
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def judge_stranger(settings: Settings, reply: Reply | NoReply) -> Finding | None:
    """Of a root that no service has ever given a name: one that answers all the same is another root's."""
    if not is_refitd(reply) or name_of(settings.root.resolve()) != "":
        return None
    return _of_another_root(settings, "the service there is of another root: none has ever run on this one")


def _of_another_root(settings: Settings, text: str) -> Finding:
    fix = f"give doctor and trainers the --host and --port of the service of {settings.root}, or name its --root"
    return Finding(check=Check.LOCK, subject=_url(settings), verdict=Verdict.FAILED, text=text, fix=fix)


def judge_door(settings: Settings, reply: Reply | NoReply) -> Finding:
    """What the answer means."""
    subject = _url(settings)
    if isinstance(reply, NoReply):
        text, fix = f"the service that runs does not answer there: {reply.reason}", "give doctor its --host and --port"
        return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    if _kind(reply).endswith(":other-root"):
        said = (reply.data or {}).get("detail", "")
        return _of_another_root(settings, f"the service there is of another root: {said}")
    if reply.status in _INCOMPLETE or _kind(reply).endswith(":run-not-followed"):
        return good(Check.TOKEN, subject, "the service that runs takes notices with this token, or without one")
    if reply.status in _UNAUTHORISED:
        text = f"the service that runs does not take this token for changes ({reply.status})"
        fix = "give trainers the token of its --token-file: notices are refused without it"
    else:
        text, fix = f"{_ROUTE} was answered with {reply.status}", "is this refitd? give doctor its --host and --port"
    return Finding(check=Check.TOKEN, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
