"""Loads of a vLLM server: what their replies mean, whether one may still run, and what one that failed left behind.

A reload runs in every process that holds weights, and each of them answers `null` when it has loaded. A server takes
its weights apart before it reads the first tensor, so any failure leaves contents that are not known, and the next
request kills the engine unless a good reload comes first. What a load that failed has read goes into the next one,
which fails of it or answers 200 all the same. So after a failure a checkpoint counts as loaded only by a load that
began after one that went well.

With two processes and more vLLM stops reading answers at the first failure: what the others say is then taken for the
answer to the next call. So such a server is loaded by refitd's extension alone, whose methods never fail.
"""

from typing import Any, cast

from refitd.engine.http import NoReply, Reply, Transport
from refitd.engine.replies import (
    Failed,
    Loaded,
    Loading,
    Unclear,
    Untouched,
    meaning_of_answers,
    meaning_of_silence,
    refused_at_the_door,
)
from refitd.engine.vllm.info import WORDS, is_dead
from refitd.text import one_line
from refitd_client.contract.plugin import answers_in

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
    """What each process answered to a /collective_rpc; None where that is not in the reply."""
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
        """Make no call yet."""
        self.lost: str | None = None
        self._http = http
        self._torn = False  # whether the last load failed: what it has read is still there

    async def load(self, path: str, within: float, *, torn: bool = False) -> Loading:
        """Load a checkpoint into a server of one process, again where something of an earlier one may be left.

        Args:
            path: as the server sees it.
            within: seconds that each load may take.
            torn: it is not known whether the load before has failed.
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
        """Have refitd's extension load a version; the extension itself sees to what was left behind."""
        return said_by_extension(await self._call("refitd_update", within, path=path), ranks)

    async def _once(self, path: str, within: float) -> Loading:
        happened = what_happened(await self._call("reload_weights", within, weights_path=path), 1)
        if not isinstance(happened, Untouched):
            self._torn = not isinstance(happened, Loaded)
        return happened

    async def _call(self, method: str, within: float, **arguments: Any) -> Reply | NoReply:
        """Call a method of each worker, without vLLM's own `timeout`: one that expires kills the engine."""
        return await self._http.post(CALL, {"method": method, "kwargs": arguments}, within)
