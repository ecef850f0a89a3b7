"""What a reply to /update_weights_from_disk means for the engine's contents. Pure.

The texts are SGLang's own (`managers/scheduler_components/weight_updater.py` and
`model_executor/model_runner_components/weight_updater.py` in 0.5.23). A reply that is not known for certain to leave
the contents alone counts as `Unclear`: SGLang's "rolling back" re-reads the checkpoint that has just failed.

Where refitd's plugin has carried out the update, its own words at the end of the message count. Each data-parallel rank
answers for all its tensor-parallel ones, the worst of which counts. A missing answer means unknown contents; ranks that
serve different versions leave an engine that serves a mixture.
"""

from dataclasses import dataclass
from typing import assert_never

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.load_reply import Loaded, Unclear, Untouched
from refitd.engine.plugin.answers import fingerprint, worst
from refitd_client.contract.plugin import MARK, NEEDS_FULL, NEEDS_LEADER, Answer, UpdateOutcome, answers_in

_REFUSES = "Failed to get weights iterator"
# Some kernels and models cannot be updated at all, which SGLang (0.5.23) says before it reads anything.
_TAKES_NONE = "Online weight updates "
_IS_STALE = "cache was not flushed"
_SUCCEEDED = "Succeeded to update model weights"
_REFUSED_KEYS = {
    401: "the engine wants a key: set --engine-key-file and --engine-admin-key-file, and name the engine with "
    "--engine or in the engines file (one that the API named is sent no key)",
    403: "the engine does not accept the key: set --engine-admin-key-file to its admin key",
    404: "the address knows no such route: a gateway or another server? name the SGLang server itself",
    405: "the address knows no such route: a gateway or another server? name the SGLang server itself",
}


@dataclass(frozen=True, slots=True)
class NotFlushed:
    """New weights, but the cache holds what the old ones computed, and path and label are the old ones."""

    reason: str


Loading = Loaded | NotFlushed | Untouched | Unclear


def what_happened(reply: Reply | NoReply, ranks: int = 1, *, drafts: bool = False) -> Loading:
    """Say what an update call did to an engine.

    Args:
        reply: to the call.
        ranks: data-parallel ranks of the engine.
        drafts: whether a draft model is loaded after the model, so that a refusal may be of the draft model alone.
    """
    if isinstance(reply, NoReply):
        if reply.lost is CallFailure.NEVER_SENT:
            return Untouched(reply.reason, reachable=False)
        return Unclear(f"{reply.reason}: it may have loaded, in part or in full")
    if reply.status in _REFUSED_KEYS:
        return Untouched(_REFUSED_KEYS[reply.status])
    if reply.data is not None and (answers := answers_in(reply.message)):
        return _said_by_plugin(reply, answers, ranks)
    return _answered(reply, reply.message.split(" | "), drafts=drafts)


def _said_by_plugin(reply: Reply, answers: list[Answer], ranks: int) -> Loading:
    """What the plugin says counts: SGLang's sentences of the same kind may be quoted in it.

    Only of the cache SGLang speaks last, in place of the plugin's answer.
    """
    stale = [part for part in reply.message.split(" | ") if _IS_STALE in part and MARK not in part]
    if stale and len(stale) + len(answers) == ranks and all(each.outcome is UpdateOutcome.SERVED for each in answers):
        return NotFlushed(f"the engine answered {reply.status}: {reply.short_message}")
    answer = worst(answers, ranks)
    match answer.outcome:
        case UpdateOutcome.SERVED if _succeeded(reply):
            how = "load" if any(each.how == "load" for each in answers) else answer.how
            return Loaded(answer.version, fingerprint([each.contents for each in answers]), how)
        case UpdateOutcome.SERVED:
            return Unclear(f"the engine answered {reply.status}: {reply.short_message}")
        case UpdateOutcome.REFUSED:
            full, led = answer.needs == NEEDS_FULL, answer.needs == NEEDS_LEADER
            return Untouched(f"the engine refused: {answer.reason}", vouched=True, needs_full=full, led=led)
        case UpdateOutcome.RESTORED:
            return Untouched(f"the load failed, and what was there is back: {answer.reason}", vouched=True)
        case UpdateOutcome.UNKNOWN:
            return Unclear(f"the load failed, and what it left behind is not known: {answer.reason}")
        case _:
            assert_never(answer.outcome)


def _answered(reply: Reply, ranks: list[str], *, drafts: bool) -> Loading:
    """Decide by the sentences of all data-parallel ranks, which SGLang joins. If they differ it is unclear."""
    if _succeeded(reply):
        return Loaded()
    # SGLang answers a request of a wrong form so, before it reaches the scheduler.
    is_validation = reply.status in {400, 422} and reply.data is not None and reply.data.get("object") == "error"
    takes_none = not drafts and all(rank.startswith(_TAKES_NONE) for rank in ranks)
    if is_validation or takes_none or all(_REFUSES in rank for rank in ranks):
        return Untouched(f"the engine refused: {reply.short_message}")
    if reply.data is not None and all(_IS_STALE in rank or _SUCCEEDED in rank for rank in ranks):
        return NotFlushed(f"the engine answered {reply.status}: {reply.short_message}")
    return Unclear(f"the engine answered {reply.status}: {reply.short_message}")


def _succeeded(reply: Reply) -> bool:
    return reply.ok and reply.data is not None and reply.data.get("success") is True


def was_done(reply: Reply) -> bool:
    """Whether the server confirms that it carried out the call, which a proxy's page with a 200 does not."""
    return reply.ok and reply.data is not None and "message" in reply.data
