"""The engines that requests go to: one, those of a run that the gate allows, or a router."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from refitd_client.contract.wire import Engine
from refitd_client.errors import RefitError
from refitd_client.http.client import RefitClient
from refitd_front.passing import EngineProxy

LOOK_SECONDS = 1.0
HOLD_SECONDS = 60.0

log = structlog.get_logger("refitd")


class NoEngineError(Exception):
    """No request can go to an engine now. The message is a sentence."""


class OneEngine:
    """An engine that the operator has given an address of its own."""

    def __init__(self, proxy: EngineProxy) -> None:
        self._proxy = proxy

    async def choose(self) -> EngineProxy:
        return self._proxy

    def all(self) -> Sequence[tuple[EngineProxy, str | None]]:
        return [(self._proxy, None)]

    async def aclose(self) -> None:
        await self._proxy.aclose()


class RunEngines:
    """The engines that follow a run, as the service knows them. `run` keeps the list, and has to be running.

    One engine gets all requests as they are. Of several, the one with the fewest requests gets the next, among those
    that the gate allows. While the run has served no version, all that answer are allowed: they have their start-up
    weights, as a trainer expects before its first update.

    Args:
        run: the run's name.
        connect: makes a proxy of an engine's URL.
        router: gets all requests; None: the front chooses.
        max_behind: trainer's steps that an engine may be behind.
    """

    def __init__(
        self,
        service_url: str,
        token_file: Path | None,
        run: str,
        connect: Callable[[str], EngineProxy],
        *,
        router: str | None = None,
        max_behind: int = 0,
    ) -> None:
        self._client = RefitClient(service_url, token_file=token_file)
        self._run, self._connect, self._max_behind = run, connect, max_behind
        self._router = None if router is None else connect(router)
        self._proxies: dict[str, EngineProxy] = {}
        self._engines: Sequence[Engine] = ()
        self._open: frozenset[str] = frozenset()
        self._fault = "the service was not asked yet"
        self._looked = asyncio.Condition()

    async def keep_looking(self) -> None:
        """Ask the service again and again, until cancelled."""
        while True:
            try:
                self._engines, self._open = await asyncio.to_thread(self._look)
                self._fault = "" if self._engines else f"no engine follows the run {self._run}, and none is free to"
            except RefitError as error:  # what it said last goes on to hold: an engine that is gone answers nothing
                self._fault = str(error)
            async with self._looked:
                self._looked.notify_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> tuple[Sequence[Engine], frozenset[str]]:
        known = self._client.engines().items
        # Before the first version of the run the engines follow none: they are those that will follow it.
        engines = [engine for engine in known if engine.run == self._run] or [e for e in known if e.run is None]
        if len(engines) < 2 or not any(engine.version for engine in engines):
            return engines, frozenset(engine.url for engine in engines if engine.unreachable_since is None)
        serving = self._client.engines(run=self._run, serves=">=0").items
        near = (engine for engine in serving if (engine.behind or 0) <= self._max_behind)
        return engines, frozenset(engine.url for engine in near)

    async def choose(self) -> EngineProxy:
        """Return where the next request goes.

        Raises:
            NoEngineError: nowhere.
        """
        if self._router is not None:
            return self._router
        try:
            async with asyncio.timeout(HOLD_SECONDS), self._looked:
                await self._looked.wait_for(lambda: bool(self._open) or len(self._engines) == 1)
        except TimeoutError:
            raise NoEngineError(self._fault or f"the gates of all engines of {self._run} are shut") from None
        urls = [self._engines[0].url] if len(self._engines) == 1 else sorted(self._open)
        return min(map(self._proxy, urls), key=lambda proxy: proxy.under_way)

    def _proxy(self, url: str) -> EngineProxy:
        if url not in self._proxies:
            self._proxies[url] = self._connect(url)
        return self._proxies[url]

    def all(self) -> Sequence[tuple[EngineProxy, str | None]]:
        """Return every engine with its kind, None where that is not known."""
        return [(self._proxy(engine.url), engine.server) for engine in self._engines]

    async def aclose(self) -> None:
        self._client.close()
        for proxy in (*self._proxies.values(), *([] if self._router is None else [self._router])):
            await proxy.aclose()


RequestTargets = OneEngine | RunEngines
