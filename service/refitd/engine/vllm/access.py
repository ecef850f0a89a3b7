"""Whether a vLLM server can be changed, and whether it sleeps, by calls that change nothing.

vLLM asks for its key at /v1 alone, so its routes for weights are open to everybody who reaches them, unless a proxy
stands before them. Whether one lets changes pass is asked by a method of the workers that changes nothing: with
VLLM_SERVER_DEV_MODE=1 the server's log has a traceback of each call that it refuses as incomplete.
"""

from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import PROBE_SECONDS
from refitd.engine.port import ChangeCheck, Obstacle, Unreached
from refitd.engine.vllm.info import DEV_MODE, Label, is_dead, read_label, said
from refitd.engine.vllm.reply import CONTROL, results

_CALL = "/collective_rpc"


def way_in(read: Reply | NoReply) -> str:
    """What to do about a server that cannot be driven, by its answer to /weight_info."""
    match read:
        case Reply(is_unauthorised=True):
            return "give it the key that the proxy before it wants: --engine-key-file names its file"
        case Reply(has_no_route=True):
            return f"start vLLM with {DEV_MODE} in its environment, and name its own address, not that of a gateway"
        case Reply() if is_dead(read):
            return "restart it: its log says of what its engine has died"
        case Reply():
            return "see its log, and that of a proxy before it"
        case NoReply(lost=CallFailure.NEVER_SENT):
            return "start it, or correct its URL, its key's file or --engine-allow"
        case NoReply():
            return "see its log: it does not answer, or has not yet while it loads"


def unreached(fault: Obstacle | str, read: Reply | NoReply) -> Unreached:
    """What a probe says of a server that lacks something, or cannot be driven.

    Args:
        fault: what it lacks, or why nothing can be said.
        read: its answer to /weight_info.
    """
    if isinstance(fault, Obstacle):
        return Unreached(reason=fault.text, advice=fault.fix, recognised=True)
    is_vllm = isinstance(read, Reply) and (is_dead(read) or isinstance(read_label(read, ""), Label))
    return Unreached(reason=fault, advice=way_in(read), recognised=is_vllm, nothing_listens=read.nothing_listens)


async def check_changes(http: Transport) -> ChangeCheck:
    reply = await http.post(_CALL, {"method": CONTROL}, PROBE_SECONDS)
    if isinstance(reply, NoReply):
        return ChangeCheck(fault=reply.reason, advice="see the engine's log: it answers reads and not this")
    if reply.ok and results(reply) is not None:
        return ChangeCheck(date=reply.date)
    if reply.is_unauthorised:
        text = f"the key that it got, if any, does not open changes ({reply.status})"
        advice = "--engine-admin-key-file holds the key that the proxy before it wants"
    elif reply.has_no_route:
        text = f"it has no {_CALL} ({reply.status})"
        advice = f"start vLLM with {DEV_MODE} in its environment"
    else:
        text = f"a call that changes nothing was answered with {reply.status}: {said(reply)}"
        advice = "is this vLLM itself, of a release that refitd knows?"
    return ChangeCheck(fault=text, advice=advice, date=reply.date)


async def asleep(http: Transport) -> str | None:
    """Why an engine that can sleep is left alone: one that is resumed while it sleeps runs without its weights."""
    reply = await http.get("/is_sleeping", PROBE_SECONDS)
    if isinstance(reply, Reply) and (reply.data or {}).get("is_sleeping") is False:
        return None
    return "it is asleep, or paused by another: it is updated once it was woken up (POST /wake_up) or resumed"
