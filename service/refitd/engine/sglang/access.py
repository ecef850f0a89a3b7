"""Whether the keys of an SGLang server open it, by calls that change nothing.

Whether a key opens changes is found out by an update that names no model: SGLang checks the key first, and then
refuses the request as incomplete (400 or 422). Nothing is paused and nothing is loaded.
"""

from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import PROBE_SECONDS
from refitd.engine.port import ChangeCheck

_UPDATE = "/update_weights_from_disk"
_BROKEN = 500  # this status and those above: the server's own fault, or a proxy's


def way_in(read: Reply | NoReply) -> str:
    """What to do about a server that cannot be driven, by its answer to /model_info."""
    match read:
        case Reply(is_unauthorised=True):
            return "give it the key that it was started with (--api-key): --engine-key-file names its file"
        case Reply(has_no_route=True):
            return "is this an SGLang that refitd can drive? Name an engine's own address, not that of a gateway"
        case Reply(status=status) if status >= _BROKEN:
            return "see its log, and that of a proxy before it"
        case Reply():
            return "name an SGLang server, of a release and with settings that refitd can drive"
        case NoReply(lost=CallFailure.NEVER_SENT):
            return "start it, or correct its URL, its key's file or --engine-allow"
        case NoReply():
            return "see its log: something listens there, and does not answer"


async def check_changes(http: Transport) -> ChangeCheck:
    reply = await http.post(_UPDATE, {}, PROBE_SECONDS)
    if isinstance(reply, NoReply):
        return ChangeCheck(fault=reply.reason, advice="see the engine's log: it answers reads and not this")
    if reply.is_incomplete:
        return ChangeCheck(date=reply.date)
    if reply.is_unauthorised:
        text = f"the key that it got, if any, does not open changes ({reply.status})"
        advice = "--engine-admin-key-file holds its --admin-api-key"
    elif reply.has_no_route:
        text = f"it has no {_UPDATE} ({reply.status}): a gateway or another front end"
        advice = "name each engine's own address: gateways have no routes for weights"
    else:
        text = f"an update that names no model was answered with {reply.status}: {reply.short_message}"
        advice = "is this SGLang itself, of a release that refitd knows?"
    return ChangeCheck(fault=text, advice=advice, date=reply.date)
