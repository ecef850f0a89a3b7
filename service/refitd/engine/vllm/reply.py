"""What a reply to a reload means for the weights of a vLLM server, and which updates are not tried at all. Pure.

A reload runs in every process that holds weights, and each of them answers `null` when it has loaded. A server takes
its weights apart before it reads the first tensor, so any failure leaves contents that are not known, and the next
request kills the engine unless a good reload comes first.

With two processes and more vLLM stops reading answers at the first failure: what the others say is then taken for the
answer to the next call. So a call whose good answer is known comes before each reload, and after a failure nothing that
such a server answers counts until it is restarted.
"""

from dataclasses import dataclass
from typing import Any, assert_never, cast

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.load_reply import Loaded, Unclear, Untouched
from refitd.engine.plugin.answers import fingerprint, worst
from refitd.engine.port import Target
from refitd.engine.vllm.info import DEV_MODE, Capabilities, is_dead, said
from refitd.engine.vllm.obstacles import obstacles
from refitd.text import one_line
from refitd_client.contract.plugin import NEEDS_FULL, NEEDS_LEADER, UpdateOutcome, answers_in

CONTROL = "get_supported_tasks"
"""A method of every worker that changes nothing. Its answer is a list, as ["generate"], and not that of a reload."""
_NOT_DONE = {
    401: "the engine wants a key: set --engine-key-file and --engine-admin-key-file",
    403: "the engine does not accept the key: set --engine-admin-key-file to its key",
    404: f"the address knows no such route: start vLLM with {DEV_MODE}, and name the server itself, not a gateway",
    405: f"the address knows no such route: start vLLM with {DEV_MODE}, and name the server itself, not a gateway",
}


@dataclass(frozen=True, slots=True)
class Failed:
    """The reload has ended and failed. A good one may save the engine as long as no request runs."""

    reason: str


Loading = Loaded | Untouched | Failed | Unclear


def what_happened(reply: Reply | NoReply, ranks: int) -> Loading:
    """Say what a reload did to a server whose weights are held by so many processes."""
    if isinstance(reply, NoReply):
        if reply.lost is CallFailure.NEVER_SENT:
            return Untouched(reply.reason, reachable=False)
        if reply.lost is CallFailure.DIED:
            return Unclear(reply.reason)
        return Unclear(f"{reply.reason}: it may have loaded, in part or in full", running=True)
    if reply.status in _NOT_DONE:
        return Untouched(_NOT_DONE[reply.status])
    if is_dead(reply):
        return Unclear("its engine has died: restart it")
    if not reply.ok:
        return Failed(f"the engine answered {reply.status}: {said(reply)}")
    answers = results(reply)
    if answers == [None] * ranks:
        return Loaded()
    return Unclear(f"{ranks} processes hold its weights, and the answers to the load were {str(answers)[:200]}")


def said_by_extension(reply: Reply | NoReply, ranks: int) -> Loading:
    """Say what an update by refitd's extension did to a server whose weights are held by so many processes."""
    happened = what_happened(reply, ranks)
    if isinstance(reply, NoReply) or not reply.ok:
        return Unclear(happened.reason) if isinstance(happened, Failed) else happened
    found = results(reply) or []
    if len(found) != ranks or not all(isinstance(each, dict) for each in found):
        return happened if isinstance(happened, Unclear) else Unclear("its workers do not answer as the extension")
    told = cast("list[dict[str, Any]]", found)
    if reasons := [str(each.get("reason")) for each in told if each.get("ok") is not True]:
        return Unclear(f"the extension could not carry out the load: {one_line(reasons[0][:500])}")
    answers = [answer for each in told for answer in answers_in(str(each.get("message")))]
    answer = worst(answers, ranks)
    reason = one_line(answer.reason[:500])
    match answer.outcome:
        case UpdateOutcome.SERVED:
            how = "load" if any(each.how == "load" for each in answers) else answer.how
            return Loaded(answer.version, fingerprint([each.contents for each in answers]), how)
        case UpdateOutcome.REFUSED:
            full, led = answer.needs == NEEDS_FULL, answer.needs == NEEDS_LEADER
            return Untouched(f"the engine refused: {reason}", needs_full=full, led=led)
        case UpdateOutcome.RESTORED:
            return Untouched(f"the load failed, and what was there is back: {reason}")
        case UpdateOutcome.UNKNOWN:
            return Unclear(f"the load failed, and what it left behind is not known: {reason}")
        case _:
            assert_never(answer.outcome)


def not_opened(reply: Reply | NoReply, ranks: int) -> Unclear | str | None:
    """Why the channel of refitd's extension is not open in each of so many processes, or cannot be used.

    `Unclear` where the answers are not those of the extension: with several processes they are those of other calls,
    or will be. None where it is open in all.
    """
    if isinstance(reply, NoReply):
        return reply.reason
    if reply.status in _NOT_DONE:
        return _NOT_DONE[reply.status]
    answers = results(reply) if reply.ok else None
    if answers is None or len(answers) != ranks or not all(isinstance(each, dict) for each in answers):
        heard = f"{reply.status}: {said(reply)}" if answers is None else str(answers)[:200]
        return Unclear(f"its workers did not answer as the extension ({heard}): has it the same refitd? restart it")
    for rank, answer in enumerate(cast("list[dict[str, Any]]", answers)):
        if answer.get("ok") is not True:
            return f"rank {rank} says: {one_line(str(answer.get('reason'))[:500])}"
    return None


def not_aligned(reply: Reply | NoReply, ranks: int) -> str | None:
    """Why the answers of its processes cannot be told apart, by the answer to `CONTROL`; None where they can."""
    if isinstance(reply, NoReply):
        return reply.reason
    answers = results(reply) if reply.ok else None
    if answers is not None and len(answers) == ranks and all(isinstance(each, list) for each in answers):
        return None
    heard = said(reply) if answers is None else str(answers)[:200]
    return f"its processes answer calls that were made before (asked for {CONTROL}, heard: {heard}): restart it"


def refusal(can: Capabilities, target: Target, *, plugged: bool, several_ranks: bool) -> str | None:
    """Why a server is not told to load a target; None where it is.

    Args:
        can: what the server can do.
        target: what it is to serve.
        plugged: whether refitd's extension loads it.
        several_ranks: whether the operator allows several processes that hold weights without the extension.
    """
    for obstacle in obstacles(can, plugged=plugged, several_ranks=several_ranks):
        if obstacle.blocks:
            return f"{obstacle.text}: {obstacle.fix}"
    if target.offered is not None and not plugged:
        return "it cannot load from a trainer's memory: that takes refitd's extension in vLLM"
    if target.in_place and not plugged:
        return "a delta cannot be written into what it serves: that takes refitd's extension in vLLM"
    return None


def results(reply: Reply) -> list[Any] | None:
    """What each process answered to a /collective_rpc; None where that is not in the reply."""
    found = (reply.data or {}).get("results")
    return cast("list[Any]", found) if isinstance(found, list) else None
