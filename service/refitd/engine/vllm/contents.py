"""What is known of the weights that a vLLM server holds, as a fingerprint: asking it, and reading the answers.

    vllm:xxh3:…             its own digests of all parameters (/weight_checker). Buffers and draft models are not in it
    vllm-answers:xxh3:…:…   what its digests cover, and the log-probabilities of a fixed prompt; `-`: it has no digests

A digest proves equality. Log-probabilities do not: two checkpoints of neighbouring steps answer almost alike, and one
checkpoint answers differently by a few hundredths when other requests share its batch. They tell a mixture, garbage or
another model from what was asked for. Linear layers that are repacked for the CPU have no bytes left in their
parameter: vLLM's digest of such a layer is the digest of nothing, and covers nothing.

`ProcessLoads` are its loads: what their replies mean, and what one that failed left behind.

A reload runs in every process that holds weights, and each of them answers `null` when it has loaded. A server takes
its weights apart before it reads the first tensor, so any failure leaves contents that are not known, and the next
request kills the engine unless a good reload comes first. What a load that failed has read goes into the next one,
which fails of it or answers 200 all the same. So after a failure a checkpoint counts as loaded only by a load that
began after one that went well.

With two processes and more vLLM stops reading answers at the first failure: what the others say is then taken for the
answer to the next call. So such a server is loaded by refitd's extension alone, whose methods never fail.
"""

import asyncio
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

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
from refitd.engine.replies import (
    Failed,
    Loaded,
    Loading,
    Unclear,
    Untouched,
    fault_of_scores,
    meaning_of_answers,
    meaning_of_silence,
    read_trial_form,
    refused_at_the_door,
)
from refitd.engine.vllm.info import CHECKER, WORDS, is_dead, read_label
from refitd.text import one_line
from refitd_client.contract.plugin import answers_in

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
    `digests`: of its parameters; None where it has none, or they say nothing of an adapter. `adapter`: which adapter
    answers; None for the model itself.
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


CALL = "/collective_rpc"
CONTROL = "get_supported_tasks"
"""A method of every worker that changes nothing. Its answer is a list, as ["generate"], and not that of a reload."""
TRIES = 4  # loads of one checkpoint after one that failed: most engines that come back have done so at the second


def what_happened(reply: Reply | NoReply, ranks: int) -> Loading:
    """Say what a reload did to a server whose weights are held by so many processes."""
    if isinstance(reply, NoReply):
        return meaning_of_silence(reply)
    if (refused := refused_at_the_door(reply, WORDS)) is not None:
        return Untouched(refused)
    if is_dead(reply):
        return Unclear("its engine has died: restart it")
    if not reply.ok:
        return Failed(f"the engine answered {reply.status}: {reply.short_message}")
    answers = results(reply)
    if answers == [None] * ranks:
        return Loaded()
    return Unclear(f"{ranks} processes hold its weights, and the answers to the load were {str(answers)[:200]}")


def said_by_extension(reply: Reply | NoReply, ranks: int) -> Loading:
    """Say what an update by refitd's extension did to a server whose weights are held by so many processes."""
    happened = what_happened(reply, ranks)
    if isinstance(reply, NoReply) or not reply.ok:
        return Unclear(happened.reason) if isinstance(happened, Failed) else happened
    found = _told_by_extension(results(reply), ranks)
    if found is None:
        return happened if isinstance(happened, Unclear) else Unclear("its workers do not answer as the extension")
    if reasons := [str(each.get("reason")) for each in found if each.get("ok") is not True]:
        return Unclear(f"the extension could not carry out the load: {one_line(reasons[0][:500])}")
    return meaning_of_answers([answer for each in found for answer in answers_in(str(each.get("message")))], ranks)


def not_opened(reply: Reply | NoReply, ranks: int) -> Unclear | str | None:
    """Why the channel of refitd's extension is not open in each of so many processes, or cannot be used.

    `Unclear` where the answers are not those of the extension: with several processes they are those of other calls,
    or will be. None where it is open in all.
    """
    if isinstance(reply, NoReply):
        return reply.reason
    if (refused := refused_at_the_door(reply, WORDS)) is not None:
        return refused
    answers = results(reply) if reply.ok else None
    if (told := _told_by_extension(answers, ranks)) is None:
        heard = f"{reply.status}: {reply.short_message}" if answers is None else str(answers)[:200]
        return Unclear(f"its workers did not answer as the extension ({heard}): has it the same refitd? restart it")
    for rank, answer in enumerate(told):
        if answer.get("ok") is not True:
            return f"rank {rank} says: {one_line(str(answer.get('reason'))[:500])}"
    return None


def results(reply: Reply) -> list[Any] | None:
    found = (reply.data or {}).get("results")
    return cast("list[Any]", found) if isinstance(found, list) else None


def _told_by_extension(answers: list[Any] | None, ranks: int) -> list[dict[str, Any]] | None:
    if answers is None or len(answers) != ranks or not all(isinstance(each, dict) for each in answers):
        return None
    return cast("list[dict[str, Any]]", answers)


class ProcessLoads:
    """The loads of one process of a server, one at a time.

    Attributes:
        lost: why nothing counts any more that this process answers; None while it does.
    """

    def __init__(self, http: Transport) -> None:
        self.lost: str | None = None
        self._http = http
        self._torn = False  # whether the last load failed: what it has read is still there

    async def load(self, path: str, within: float, *, torn: bool = False) -> Loading:
        """Load a checkpoint into a server of one process, again where something of an earlier one may be left. `torn`:
        it is not known whether the load before has failed.
        """
        self._torn = self._torn or torn
        for _ in range(TRIES - 1):
            began_torn = self._torn
            happened = await self._once(path, within)
            if not isinstance(happened, Loaded | Failed) or not began_torn:
                return happened
        began_torn = self._torn
        happened = await self._once(path, within)
        return Failed("it loads only now and then") if began_torn and isinstance(happened, Loaded) else happened

    async def by_extension(self, path: str, ranks: int, within: float) -> Loading:
        return said_by_extension(await self._call("refitd_update", within, path=path), ranks)

    async def _once(self, path: str, within: float) -> Loading:
        happened = what_happened(await self._call("reload_weights", within, weights_path=path), 1)
        if not isinstance(happened, Untouched):
            self._torn = not isinstance(happened, Loaded)
        return happened

    async def _call(self, method: str, within: float, **arguments: Any) -> Reply | NoReply:
        """Call a method of each worker, without vLLM's own `timeout`: one that expires kills the engine."""
        return await self._http.post(CALL, {"method": method, "kwargs": arguments}, within)
