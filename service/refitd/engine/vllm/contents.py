"""What is known of the weights that a vLLM server holds, as a fingerprint, and whether two fingerprints agree. Pure.

    vllm:xxh3:…             its own digests of all parameters (/weight_checker). Buffers and draft models are not in it
    vllm-answers:xxh3:…:…   what its digests cover, and the log-probabilities of a fixed prompt; `-`: it has no digests

A digest proves equality. Log-probabilities do not: two checkpoints of neighbouring steps answer almost alike, and one
checkpoint answers differently by a few hundredths when other requests share its batch. They tell a mixture, garbage or
another model from what was asked for. Linear layers that are repacked for the CPU have no bytes left in their
parameter: vLLM's digest of such a layer is the digest of nothing, and covers nothing.
"""

import math
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import xxhash

from refitd.engine.fingerprints import ANSWERED, BY_PLUGIN, CHECKED
from refitd.engine.http import NoReply, Reply
from refitd.engine.vllm.info import is_dead, said

NEAR = 0.5  # natural logarithms: two log-probabilities of one token that differ by more are of different weights
PROMPT = [*range(1, 17)]  # token ids in every vocabulary; no tokenizer is needed
TRIAL: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "echo": True,
    "logprobs": 0,
}
"""The prompt's tokens are scored, and a few more are generated."""

_OF_NOTHING = sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Digests:
    """The server's digests of its parameters as one; `whole`: they cover every parameter."""

    digest: str
    whole: bool


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


def read_digests(reply: Reply | NoReply) -> Digests | NoReply | None:
    """The answer of /weight_checker; None where the server cannot tell."""
    if isinstance(reply, NoReply):
        return reply
    try:
        found = reply.read_as(_Checksums).checksums if reply.ok else {}
    except msgspec.ValidationError:
        return None
    covered = {name: digest for name, digest in found.items() if digest != _OF_NOTHING}
    if not covered:
        return None
    ordered = msgspec.json.encode(covered, order="sorted")
    return Digests(f"xxh3:{xxhash.xxh3_128(ordered).hexdigest()}", whole=len(covered) == len(found))


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probabilities of the prompt's tokens, the first of which has none."""

    values: tuple[float, ...]


def read_trial(reply: Reply | NoReply) -> Scores | str:
    """The answer to `TRIAL`, or a sentence on why it is not in order."""
    if isinstance(reply, NoReply):
        return f"no answer to a trial: {reply.reason}"
    if not reply.ok:
        what = "its engine has died" if is_dead(reply) else f"{reply.status}: {said(reply)}"
        return f"a trial was answered with an error: {what}"
    try:
        choices = reply.read_as(_Completion).choices
    except msgspec.ValidationError as error:
        return f"the answer to a trial cannot be read: {error}"
    found = choices[0].logprobs.token_logprobs[1:] if choices else []
    scores = tuple(each for each in found if each is not None)
    if len(found) < len(PROMPT) or len(scores) != len(found):
        return "a trial brought no tokens"
    if not all(math.isfinite(score) for score in scores):
        return "a trial brought tokens whose log-probability is no number"
    return Scores(scores[: len(PROMPT) - 1])


def fingerprint(digests: Digests | None, answer: Scores | None) -> str | None:
    """One text for what is known; None where the digests do not cover all and there is no answer."""
    if digests is not None and digests.whole:
        return f"{CHECKED}{digests.digest}"
    if answer is None:
        return None
    scores = ",".join(f"{score:.3f}" for score in answer.values)
    return f"{ANSWERED}{'-' if digests is None else digests.digest}:{scores}"


def agree(some: str, other: str) -> bool | None:
    """Whether two fingerprints are of the same contents, as far as they can tell; None: they cannot be compared."""
    for prefix in (CHECKED, BY_PLUGIN):
        if some.startswith(prefix) and other.startswith(prefix):
            return some == other
    if not (some.startswith(ANSWERED) and other.startswith(ANSWERED)):
        return None
    (digest, scores), (digest_2, scores_2) = _parts(some), _parts(other)
    if "-" not in (digest, digest_2) and digest != digest_2:
        return False
    return len(scores) == len(scores_2) and all(abs(x - y) <= NEAR for x, y in zip(scores, scores_2, strict=True))


def _parts(text: str) -> tuple[str, list[float]]:
    digest, _, scores = text.removeprefix(ANSWERED).rpartition(":")
    return digest, [float(score) for score in scores.split(",")]
