"""Asking a vLLM server what it holds, and holding that against what it should. `contents` reads the answers."""

import asyncio

from refitd.engine.http import CHECKSUMS_BYTES, CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS, CHECK_SECONDS, TRIAL_SECONDS
from refitd.engine.port import Target
from refitd.engine.vllm.contents import TRIAL, Digests, agree, fingerprint, read_digests, read_trial
from refitd.engine.vllm.info import CHECKER, read_label

OTHER_PARAMETERS = "its parameters are not those that a clean load of this version gave"


async def digests_of(http: Transport, *, checker: bool) -> Digests | NoReply | None:
    """The server's digests of its parameters; None where it has none (`checker`: it has the route)."""
    if not checker:
        return None
    reply = await http.post(CHECKER, {"action": "checksum"}, CHECK_SECONDS, most=CHECKSUMS_BYTES)
    return await asyncio.to_thread(read_digests, reply)


async def ask(http: Transport, adapter: str | None = None) -> Reply | NoReply:
    """Have a fixed prompt scored, as a client would; by an adapter where one is named."""
    return await http.ask("/v1/completions", TRIAL | ({} if adapter is None else {"model": adapter}), TRIAL_SECONDS)


async def fingerprint_of(
    http: Transport, alike: str | None, *, checker: bool, adapter: str | None = None
) -> str | None:
    """The fingerprint of what a server holds; None where it cannot be told, as by answers of one that is paused.

    Args:
        http: to the server.
        alike: is returned where the contents agree with it: scores are never equal to the last digit.
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
    answer = read_trial(await ask(http, adapter))
    found = None if isinstance(answer, str) else fingerprint(digests, answer)
    return alike if found is not None and alike is not None and agree(found, alike) else found


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
    reply = await ask(http, adapter)
    if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
        return None, None  # many requests are before it: that says nothing of the weights
    answer = read_trial(reply)
    if isinstance(answer, str):
        return None, answer
    found = fingerprint(digests, answer)
    if found is not None and target.fingerprint is not None and agree(found, target.fingerprint) is False:
        return found, "its answers are not those that a clean load of this version gave"
    return found, None


async def tried(http: Transport, label: str) -> str | None:
    """Why the answer to a fixed prompt is not in order, or of another version than `label` says; None where it is."""
    answer = read_trial(await ask(http))
    if isinstance(answer, str):
        return answer
    named = read_label(await http.get("/weight_info", CALL_SECONDS), http.url)
    if isinstance(named, str):
        return f"a trial was answered, but not by which version: {named}"
    if named.weight_version != label:
        return f"a trial was answered by version {named.weight_version!r}, not {label!r}"
    return None


def doubt(found: str | None, target: Target, *, unchanged: bool) -> str | None:
    """Why the engine does not hold the target, as far as its fingerprint says; None where nothing speaks against it.

    Args:
        found: the fingerprint after the load; None where answers alone can tell.
        target: what was loaded.
        unchanged: whether the files are still those that were checked.
    """
    same = None if found is None or target.fingerprint is None else agree(found, target.fingerprint)
    if same is False:
        return OTHER_PARAMETERS
    if same is None and found is not None and found == target.not_fingerprint:
        return "its parameters have not changed, and the files of the two versions differ"
    if not unchanged and not same:
        return "its files changed meanwhile, or it is not known whether they did"
    return None
