"""The check of a canary: the first engine that serves a version answers for it before the others get it.

refitd's own part is a trial: a few tokens, asked for as a rollout would, with a finite log-probability each and the
label of the version. The operator's part is a URL that gets a POST about the canary and answers yes (2xx) or no (4xx).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace

import httpx

from refitd.policy.strategy import awaits_check
from refitd.state.records import CheckState, EngineRecord, UpdateRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import one_line, without_secrets, without_secrets_of
from refitd.update.targets import Targets
from refitd_client.http.connection import IDENTITY

CANARY_SECONDS = 600.0  # an operator's check may run a small evaluation
CANARY_RETRY_SECONDS = 1.0
_ANSWER_SHOWN = 200  # characters of an answer
_ANSWER_READ = 2**16  # bytes of it

Tell = Callable[[str], None]
CanaryCheck = Callable[[VersionRecord, EngineRecord, Tell], Awaitable[str | None]]
"""Returns why the canary is bad, None where it is good; meanwhile it reports what it waits for."""


class CanaryChecks:
    """Checks canaries once they serve a version, until cancelled. `checks` run in order, up to the first fault.

    Each run has a check of its own: one that takes minutes holds up no other run, and is cancelled when its version is
    not the one that engines go to any more.
    """

    def __init__(self, store: Store, targets: Targets, checks: list[CanaryCheck]) -> None:
        self._store = store
        self._targets = targets
        self._checks = checks
        self._asking: dict[tuple[str, int, str], asyncio.Task[None]] = {}  # by run, number of the update, version

    async def run(self) -> None:
        """Look at each change in the store."""
        seen = -1
        async with asyncio.TaskGroup() as group:
            while True:
                seen = await self._store.changed.wait_after(seen)
                for key in [key for key in self._asking if not self._is_current(*key)]:
                    self._asking.pop(key).cancel()
                for update in list(self._store.updates.values()):
                    self._look(update, group)

    def _is_current(self, run: str, number: int, version: str) -> bool:
        update, target = self._store.updates.get(run), self._targets.of_run(run).target
        return update is not None and update.number == number and target is not None and target.id == version

    def _look(self, update: UpdateRecord, group: asyncio.TaskGroup) -> None:
        target = self._targets.of_run(update.run).target
        if target is None:
            return
        canary = awaits_check(self._targets.strategy, target, update, self._store.engines_of(update.run))
        key = (update.run, update.number, target.id)
        if canary is not None and key not in self._asking:
            asked = self._ask(target, canary, key)
            self._asking[key] = group.create_task(asked, name=f"check {target.id} on {canary.id}")

    async def _ask(self, target: VersionRecord, canary: EngineRecord, key: tuple[str, int, str]) -> None:
        def tell(trouble: str) -> None:
            update = self._store.updates.get(key[0])
            reason = f"the check of the canary {canary.id} has not come to an end: {trouble}; it is asked again"
            if update is not None and self._is_current(*key) and update.reason != reason:
                self._store.put_update(replace(update, reason=reason), reason)

        fault = None
        for check in self._checks:
            if (fault := await check(target, canary, tell)) is not None:
                break
        if self._asking.pop(key, None) is None or not self._is_current(*key):
            return  # rolled back or overtaken meanwhile
        now = self._store.engines.get(canary.id)
        if fault is not None and (now is None or now.serving != target.id):
            self._store.changed.notify()  # the canary went away: that says nothing of the version; the next is asked
            return
        update = self._store.updates[target.run]
        if fault is None:
            text = f"the canary {canary.id} passed its check with {update.version}: the others follow"
            self._store.put_update(replace(update, check=CheckState.PASSED, reason=None), text)
        else:
            reason = f"the canary {canary.id} failed its check: {fault}"
            self._store.put_update(replace(update, check=CheckState.FAILED, reason=reason), reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryQuestion:
    """The JSON body that an operator's check gets. `url` is the engine's."""

    run: str
    step: int
    version: str
    engine: str
    url: str


class OperatorCheck:
    """Asks the operator's URL. No redirects, no proxies from the environment; while it is down it is asked again.

    Reasons name the URL without user, password and query, and so does what they quote of the answers: they appear in
    the log and in the API.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._shown = without_secrets(url)

    async def __call__(self, version: VersionRecord, engine: EngineRecord, tell: Tell) -> str | None:
        question = CanaryQuestion(
            run=version.run, step=version.order.step, version=version.id, engine=engine.id, url=engine.url
        )
        trouble = "it did not answer"
        try:
            async with (
                asyncio.timeout(CANARY_SECONDS),
                httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=CANARY_SECONDS) as http,
            ):
                while True:
                    try:
                        async with http.stream("POST", self._url, json=asdict(question), headers=IDENTITY) as reply:
                            text = await _beginning(reply)
                    except httpx.HTTPError as error:
                        trouble = f"it cannot be asked: {self._quoted(str(error))}"
                    else:
                        if reply.is_success:
                            return None
                        trouble = f"it answered {reply.status_code}: {self._quoted(text)}"
                        if reply.is_client_error:
                            return f"{self._shown} says no: {trouble}"
                    tell(f"{self._shown}: {trouble}")
                    await asyncio.sleep(CANARY_RETRY_SECONDS)
        except TimeoutError:
            return f"{self._shown} said nothing within {CANARY_SECONDS:g} s: {trouble}"

    def _quoted(self, text: str) -> str:
        """The first characters of a server's or library's text, without secrets."""
        return one_line(without_secrets_of(self._url, text)[:_ANSWER_SHOWN])


async def _beginning(reply: httpx.Response) -> str:
    data = bytearray()
    async for piece in reply.aiter_raw():
        data += piece
        if len(data) >= _ANSWER_READ:
            break
    return data.decode(errors="replace")
