"""What a host answers, and what it means for the rollout: no call is made here."""

from dataclasses import dataclass, replace

import msgspec

from refitd.engine.fingerprints import comparable
from refitd.engine.http import NoReply, Reply
from refitd.engine.port import Process as ServerProcess
from refitd.engine.port import Reached, Unreached
from refitd_client.contract.decoding import converted
from refitd_client.contract.follow import Following, HostTrialResult
from refitd_client.contract.hosts import HostEngines, OrderState
from refitd_client.contract.naming import parse_version_id, version_folder

NOTHING_PROVED = "(nothing that is proved)"
_UNAUTHORISED = frozenset({401, 403})
_NOT_THERE = 404
_LATER = frozenset({408, 429, 500, 502, 503, 504, 507})
_OTHER_LEAD = "urn:refitd:problem:order-refused"
_OVERTAKEN = "urn:refitd:problem:order-overtaken"
_REFITD = "urn:refitd:problem:"
_FIX = "start the service there with --follow and the URL of this one, and with --engine for its engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """An answer that cannot be used: why, in a sentence, and what to do.

    Attributes:
        reason: a sentence.
        advice: what an operator can do about it, "" for nothing.
        recognised: a refitd is there.
        later: asking again may help, since nothing was decided.
        led: another service leads the host.
        overtaken: an order, since which the host has obeyed another.
    """

    reason: str
    advice: str = ""
    recognised: bool = False
    later: bool = True
    led: bool = False
    overtaken: bool = False


def following(reply: Reply | NoReply, url: str) -> Following | NoAnswer:
    """What a host says of itself.

    Args:
        reply: to `GET /v1/follow`, or to an order.
        url: of the host.
    """
    if isinstance(reply, NoReply):
        return NoAnswer(reason=reply.reason, advice="start it, or correct its URL, its token's file or --engine-allow")
    if not reply.ok:
        return _refused(reply, url)
    try:
        return converted(reply.data, Following)
    except msgspec.ValidationError as error:
        return NoAnswer(reason=f"{url}/v1/follow answered in another form: {error}", advice="is it a refitd?")


def _refused(reply: Reply, url: str) -> NoAnswer:
    kind = str((reply.data or {}).get("type", ""))
    is_refitd = kind.startswith(_REFITD)
    if reply.status in _UNAUTHORISED:
        advice = "give the host's tokens: --engine-key-file opens what looks, --engine-admin-key-file what changes"
        return NoAnswer(
            reason=f"{url} answered {reply.status}: {reply.short_message}",
            advice=advice,
            recognised=is_refitd,
            later=False,
        )
    if reply.status == _NOT_THERE and is_refitd:
        return NoAnswer(reason=f"the refitd at {url} follows no upstream", advice=_FIX, recognised=True, later=False)
    reason = f"{url} answered {reply.status}: {reply.short_message}"
    overtaken = kind == _OVERTAKEN
    return NoAnswer(
        reason=reason,
        recognised=is_refitd,
        later=overtaken or reply.status in _LATER,
        led=kind == _OTHER_LEAD,
        overtaken=overtaken,
        advice="see its log",
    )


def trial_fault(reply: Reply | NoReply) -> str | None:
    """What is wrong with a host's trial; None where nothing is."""
    if isinstance(reply, NoReply):
        return reply.reason
    if not reply.ok:
        return f"the host answered {reply.status}: {reply.short_message}"
    try:
        return converted(reply.data, HostTrialResult).fault
    except msgspec.ValidationError as error:
        return f"the host answered in another form: {error}"


def reached(told: Following, root: str, address: str | None) -> Reached | Unreached:
    """What a probe says of a host that has answered.

    Args:
        told: what it says of itself.
        root: the root as engines of this kind are said to see it: versions are named by their paths in it.
        address: where the connection went.
    """
    if told.order is OrderState.AWAY or told.host is None or not told.host.count:
        why = told.order_reason or "it has no engine"
        return Unreached(reason=f"the host {told.follower} answers, and {why}", advice=_FIX, recognised=True)
    path, label = named(told.serves, root)
    return Reached(
        model_path=path,
        weight_version=label,
        server_version=told.release,
        configuration=told.configuration,
        startup_path=None,
        process=ServerProcess(started=told.process),
        address=address,
        server="refitd",
        pulls=True,
        host=picture(told),
        serves=told.serves,
        desires=told.desired,
    )


def picture(told: Following) -> HostEngines | None:
    """What a host says of its engines, and of what it does for them now; None where it names no engines."""
    if told.host is None:
        return None
    goes = told.order is OrderState.COMES and not waits_itself(told)
    is_loading = goes and told.ordered == told.desired
    return replace(
        told.host,
        upstream=told.upstream,
        pulling=told.pulling,
        pulled_bytes=told.pulled_bytes,
        loading=told.desired if is_loading else None,
    )


def waits_itself(told: Following) -> bool:
    """Whether what was ordered is there and good, and the host goes nowhere since its own operator has paused it."""
    return told.host is not None and told.host.waits is not None and told.order_reason == told.host.waits


def named(version: str | None, root: str) -> tuple[str, str | None]:
    """The path and label by which the rollout knows a version that a host serves."""
    parsed = parse_version_id(version or "")
    if parsed is None:
        return NOTHING_PROVED, None
    run, order = parsed
    return f"{root}/{run}/{version_folder(order)}", str(order.step)


def doubt(proof: str | None, expected: str | None, not_expected: str | None) -> str | None:
    """Why a host that proves a version to itself is not believed, None where it is.

    Args:
        proof: the host's.
        expected: what another clean load of the version gave; None where none is on record.
        not_expected: what the contents before gave, where the files differ.
    """
    if proof is None:
        return None
    if comparable(proof, expected) and proof != expected:
        return "its engines' fingerprints are not those that the version has on other hosts"
    if proof == not_expected:
        return "its engines' fingerprints are those of what they served before"
    return None
