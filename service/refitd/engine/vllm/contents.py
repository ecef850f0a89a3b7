"""What is known of the weights that a vLLM server holds, as a fingerprint: asking it, and reading the answers.

    vllm:xxh3:…             its own digests of all parameters (/weight_checker). Buffers and draft models are not in it
    vllm-answers:xxh3:…:…   what its digests cover, and the log-probabilities of a fixed prompt; `-`: it has no digests

A digest proves equality. Log-probabilities do not: two checkpoints of neighbouring steps answer almost alike, and one
checkpoint answers differently by a few hundredths when other requests share its batch. They tell a mixture, garbage or
another model from what was asked for. Linear layers that are repacked for the CPU have no bytes left in their
parameter: vLLM's digest of such a layer is the digest of nothing, and covers nothing.
"""

import asyncio
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import xxhash

from refitd.engine.fingerprints import ANSWERED, CHECKED, alike
from refitd.engine.http import (
    CALL_SECONDS,
    CHECK_SECONDS,
    CHECKSUMS_BYTES,
    TRIAL_SECONDS,
    CallFailure,
    NoReply,
    Reply,
    Transport,
)
from refitd.engine.port import Target
from refitd.engine.replies import fault_of_scores, read_trial_form
from refitd.engine.vllm.info import CHECKER, read_label

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
    if isinstance(read := read_trial_form(reply, _Completion), str):
        return read
    found = read.choices[0].logprobs.token_logprobs[1:] if read.choices else []
    scores = tuple(each for each in found if each is not None)
    fault = fault_of_scores(scores, are_enough=len(PROMPT) <= len(found) == len(scores))
    return fault or Scores(scores[: len(PROMPT) - 1])


def fingerprint(digests: Digests | None, answer: Scores | None) -> str | None:
    """One text for what is known; None where the digests do not cover all and there is no answer."""
    if digests is not None and digests.whole:
        return f"{CHECKED}{digests.digest}"
    if answer is None:
        return None
    scores = ",".join(f"{score:.3f}" for score in answer.values)
    return f"{ANSWERED}{'-' if digests is None else digests.digest}:{scores}"


async def digests_of(http: Transport, *, checker: bool) -> Digests | NoReply | None:
    """The server's digests of its parameters; None where it has none (`checker`: it has the route)."""
    if not checker:
        return None
    reply = await http.post(CHECKER, {"action": "checksum"}, CHECK_SECONDS, most=CHECKSUMS_BYTES)
    return await asyncio.to_thread(read_digests, reply)


async def scored(http: Transport, adapter: str | None = None) -> Scores | str | None:
    """Have a fixed prompt scored, as a client would; by an adapter where one is named.

    Returns:
        The scores, or why the answer is not in order. None that it did not come in time: many requests are before it,
        which says nothing of the weights.
    """
    reply = await http.ask("/v1/completions", TRIAL | ({} if adapter is None else {"model": adapter}), TRIAL_SECONDS)
    if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
        return None
    return read_trial(reply)


async def fingerprint_of(
    http: Transport, recorded: str | None, *, checker: bool, adapter: str | None = None
) -> str | None:
    """The fingerprint of what a server holds; None where it cannot be told, as by answers of one that is paused.

    Args:
        http: to the server.
        recorded: is returned where the contents agree with it: scores are never equal to the last digit.
        checker: whether it computes digests.
        adapter: which adapter answers; None for the model itself.
    """
    digests = await digests_of(http, checker=checker)
    if isinstance(digests, NoReply):
        return None
    if digests is not None and digests.whole:
        return fingerprint(digests, None)
    paused = await http.get("/is_paused", CALL_SECONDS)
    if not isinstance(paused, Reply) or (paused.data or {}).get("is_paused") is not False:
        return None
    answer = await scored(http, adapter)
    found = fingerprint(digests, answer) if isinstance(answer, Scores) else None
    return recorded if found is not None and recorded is not None and alike(found, recorded) else found


async def answered(
    http: Transport, digests: Digests | None, target: Target, adapter: str | None = None
) -> tuple[str | None, str | None]:
    """The fingerprint by an answer, and why the answer is not the target's; None for each where there is none.

    Args:
        http: to the server.
        digests: of its parameters; None where it has none, or they say nothing of an adapter.
        target: what was loaded.
        adapter: which adapter answers; None for the model itself.
    """
    answer = await scored(http, adapter)
    if not isinstance(answer, Scores):
        return None, answer
    found = fingerprint(digests, answer)
    if found is not None and target.fingerprint is not None and alike(found, target.fingerprint) is False:
        return found, "its answers are not those that a clean load of this version gave"
    return found, None


async def trial_fault(http: Transport, label: str) -> str | None:
    """Why the answer to a fixed prompt is not in order, or of another version than `label` says; None where it is."""
    answer = await scored(http)
    if not isinstance(answer, Scores):
        return answer or f"no answer to a trial within {TRIAL_SECONDS:g} s"
    named = read_label(await http.get("/weight_info", CALL_SECONDS), http.url)
    if isinstance(named, str):
        return f"a trial was answered, but not by which version: {named}"
    if named.weight_version != label:
        return f"a trial was answered by version {named.weight_version!r}, not {label!r}"
    return None
