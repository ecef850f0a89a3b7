"""What SGLang's replies mean: to a load, to a request for checksums, to a trial. Pure.

The texts are SGLang's own (`managers/scheduler_components/weight_updater.py` and
`model_executor/model_runner_components/weight_updater.py` in 0.5.23). A reply that is not known for certain to leave
the contents alone counts as `Unclear`: SGLang's "rolling back" re-reads the checkpoint that has just failed.

Where refitd's plugin has carried out the update, its own words at the end of the message count. Each data-parallel rank
answers for all its tensor-parallel ones.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from refitd.engine.http import NoReply, Reply
from refitd.engine.replies import (
    Loaded,
    Loading,
    ServerWords,
    Unclear,
    Untouched,
    fault_of_scores,
    meaning_of_answers,
    meaning_of_silence,
    read_trial_form,
    refused_at_the_door,
)
from refitd_client.contract.plugin import MARK, Answer, UpdateOutcome, answers_in

_REFUSES = "Failed to get weights iterator"
# Some kernels and models cannot be updated at all, which SGLang (0.5.23) says before it reads anything.
_TAKES_NONE = "Online weight updates "
_IS_STALE = "cache was not flushed"
_SUCCEEDED = "Succeeded to update model weights"
WORDS = ServerWords(
    name="SGLang",
    one="an SGLang server",
    key="it was started with (--api-key)",
    admin_key="its --admin-api-key",
    elsewhere="is this an SGLang that refitd can drive? Name an engine's own address, not that of a gateway: gateways "
    "have no routes for weights",
)
TRIAL: dict[str, Any] = {
    "input_ids": [1, 2, 3],  # in every vocabulary, and no tokenizer is needed
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}


@dataclass(frozen=True, slots=True)
class NotFlushed:
    """New weights, but the cache holds what the old ones computed, and path and label are the old ones."""

    reason: str


def what_happened(reply: Reply | NoReply, ranks: int = 1, *, drafts: bool = False) -> Loading | NotFlushed:
    """Say what an update call did to an engine.

    Args:
        reply: to the call.
        ranks: data-parallel ranks of the engine.
        drafts: whether a draft model is loaded after the model, so that a refusal may be of the draft model alone.
    """
    if isinstance(reply, NoReply):
        return meaning_of_silence(reply)
    if (refused := refused_at_the_door(reply, WORDS)) is not None:
        return Untouched(refused)
    if reply.data is not None and (answers := answers_in(reply.message)):
        return _said_by_plugin(reply, answers, ranks)
    return _said_by_sglang(reply, reply.message.split(" | "), drafts=drafts)


def _said_by_plugin(reply: Reply, answers: list[Answer], ranks: int) -> Loading | NotFlushed:
    """What the plugin says counts: SGLang's sentences of the same kind may be quoted in it.

    Only of the cache SGLang speaks last, in place of the plugin's answer.
    """
    stale = [part for part in reply.message.split(" | ") if _IS_STALE in part and MARK not in part]
    if stale and len(stale) + len(answers) == ranks and all(each.outcome is UpdateOutcome.SERVED for each in answers):
        return NotFlushed(_answered(reply))
    happened = meaning_of_answers(answers, ranks)
    return Unclear(_answered(reply)) if isinstance(happened, Loaded) and not _has_succeeded(reply) else happened


def _said_by_sglang(reply: Reply, ranks: list[str], *, drafts: bool) -> Loading | NotFlushed:
    """Decide by the sentences of all data-parallel ranks, which SGLang joins. If they differ it is unclear."""
    if _has_succeeded(reply):
        return Loaded()
    # SGLang answers a request of a wrong form so, before it reaches the scheduler.
    is_validation = reply.is_incomplete and reply.data is not None and reply.data.get("object") == "error"
    takes_none = not drafts and all(rank.startswith(_TAKES_NONE) for rank in ranks)
    if is_validation or takes_none or all(_REFUSES in rank for rank in ranks):
        return Untouched(f"the engine refused: {reply.short_message}")
    if reply.data is not None and all(_IS_STALE in rank or _SUCCEEDED in rank for rank in ranks):
        return NotFlushed(_answered(reply))
    return Unclear(_answered(reply))


def _answered(reply: Reply) -> str:
    return f"the engine answered {reply.status}: {reply.short_message}"


def _has_succeeded(reply: Reply) -> bool:
    return reply.ok and reply.data is not None and reply.data.get("success") is True


def was_done(reply: Reply | NoReply) -> bool:
    """Whether the server confirms that it carried out the call, which a proxy's page with a 200 does not."""
    return isinstance(reply, Reply) and reply.ok and reply.data is not None and "message" in reply.data


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Ranks(msgspec.Struct):
    ranks: list[_Rank]


def fingerprint_in(reply: Reply) -> str | None:
    """One digest over the checksums of all ranks' tensors, in any order; None where the reply has none."""
    try:
        ranks = reply.read_as(_Ranks).ranks if reply.ok else []
    except msgspec.ValidationError:
        return None
    checksums = [rank.checksums for rank in ranks]
    return digest_of(checksums) if checksums and all(checksums) else None


def digest_of(checksums: list[dict[str, str]]) -> str:
    """One digest over all ranks' tensors."""
    each = sorted(msgspec.json.encode(rank, order="sorted") for rank in checksums)
    return f"xxh3:{xxhash.xxh3_128(b''.join(each)).hexdigest()}"


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_version: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The answer to `TRIAL`: the log-probability and the id of each token, and the label where the server names one."""

    scores: tuple[tuple[float, int], ...]
    label: str | None

    def fault(self, label: str) -> str | None:
        """Why it is not an answer of the version that has the label; None where it is, or says nothing of it."""
        if self.label in (None, label):
            return None
        return f"a trial was answered by version {self.label!r}, not {label!r}"


def read_trial(reply: Reply | NoReply) -> TrialAnswer | str:
    """The answer to `TRIAL`, or why it is not in order: no tokens, or no number where a log-probability belongs."""
    if isinstance(found := read_trial_form(reply, _Answer), str):
        return found
    scores = tuple((logprob, token) for logprob, token, _ in found.meta_info.output_token_logprobs)
    fault = fault_of_scores((logprob for logprob, _ in scores), are_enough=bool(scores))
    return fault or TrialAnswer(scores, found.meta_info.weight_version)


def trial_fault(reply: Reply | NoReply, label: str) -> str | None:
    """Why the answer to `TRIAL` is not in order, or not of the version that has the label; None where it is."""
    answer = read_trial(reply)
    return answer if isinstance(answer, str) else answer.fault(label)
