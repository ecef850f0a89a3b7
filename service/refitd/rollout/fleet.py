"""The engines: who they are, and a task for each. Settings, engines file and API name them, the ledger remembers."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from refitd.catalog.record import VersionRecord
from refitd.engine.address import AddressRefusedError, check_url, engine_id
from refitd.engine.engines_file import EnginesFileError, EngineSpec, parse_engines
from refitd.engine.port import Engine
from refitd.ledger import Ledger
from refitd.problem import Kind, ProblemError
from refitd.rollout.record import EngineRecord, Source
from refitd.rollout.replica import Replica
from refitd_client.contract.naming import NameRefusedError, check_run
from refitd_client.contract.wire import NewEngine

FILE_LOOK_SECONDS = 2.0

log = structlog.get_logger("refitd")


class Fleet:
    """Owns a replica for each engine. `connect` makes the adapter, `check` looks at a version right before its load."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        root: str,
        urls: list[str],
        engines_file: Path | None,
        probe_interval: float,
        connect: Callable[[EngineSpec], Engine],
        check: Callable[[VersionRecord], Awaitable[bool]],
    ) -> None:
        self._ledger = ledger
        self._root = root
        self._urls = urls
        self._file = engines_file
        self._file_text: str | None = None
        self._probe_interval = probe_interval
        self._connect = connect
        self._check = check
        self._chance = random.Random()  # noqa: S311 - jitter, not a secret
        self._group: asyncio.TaskGroup | None = None
        self._specs: dict[str, EngineSpec] = {}
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run all replicas and follow the engines file, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._forget_unnamed()
            for url in self._urls:
                self._start(EngineSpec(url=url), Source.SETTINGS)
            for record in [r for r in self._ledger.engines.values() if r.source is Source.API]:
                self._start(EngineSpec(url=record.url, id=record.id, run=record.run), Source.API)
            while True:
                await self._follow_file()
                await asyncio.sleep(FILE_LOOK_SECONDS)

    def _forget_unnamed(self) -> None:
        """Engines that the journal knows from settings that have changed since are nobody's any more."""
        named = {engine_id(url) for url in self._urls}
        for record in list(self._ledger.engines.values()):
            if record.source is Source.SETTINGS and record.id not in named:
                self._ledger.drop_engine(record.id)

    def _start(self, spec: EngineSpec, source: Source) -> str:
        if self._group is None:
            raise ProblemError(Kind.NOT_READY, "the service is starting: try again")
        name = spec.id or engine_id(spec.url)
        known = self._ledger.engines.get(name)
        if known is None or known.url != spec.url:
            self._ledger.put_engine(EngineRecord(id=name, url=spec.url, run=spec.run, source=source), "added")
        adapter = self._connect(spec)
        self._specs[name] = spec
        self._replicas[name] = Replica(
            name,
            adapter,
            self._ledger,
            seen_path=lambda version: f"{spec.root or self._root}/{version.path}",
            check=self._check,
            probe_interval=self._probe_interval,
            chance=self._chance,
        )
        self._tasks[name] = self._group.create_task(self._keep(name, adapter), name=f"replica {name}")
        return name

    async def _keep(self, name: str, adapter: Engine) -> None:
        try:
            await self._replicas[name].run()
        finally:
            await adapter.aclose()
            del self._replicas[name], self._specs[name], self._tasks[name]

    async def _follow_file(self) -> None:
        if self._file is None:
            return
        try:
            text = await asyncio.to_thread(self._file.read_text)
            if text == self._file_text:
                return
            specs = {spec.id or engine_id(check_url(spec.url)): spec for spec in parse_engines(text)}
        except (OSError, UnicodeDecodeError, EnginesFileError, AddressRefusedError) as error:
            # What was read before stays in force: a slip in an editor takes no engine away.
            log.error("the engines file cannot be used", file=str(self._file), error=str(error))
            return
        self._file_text = text
        await self._apply(specs)

    async def _apply(self, specs: dict[str, EngineSpec]) -> None:
        for record in list(self._ledger.engines.values()):
            if record.source is Source.FILE and specs.get(record.id) != self._specs.get(record.id):
                self._ledger.drop_engine(record.id)
                if task := self._tasks.get(record.id):
                    await asyncio.wait({task})
        for name, spec in specs.items():
            if name not in self._tasks:
                self._start(spec, Source.FILE)

    def add(self, engine: NewEngine) -> str:
        """Take in an engine that the API names; return its id.

        Raises:
            ProblemError: the URL cannot be used, or the engine is known already.
        """
        try:
            url = check_url(engine.url)
            run = None if engine.run is None else check_run(engine.run)
        except AddressRefusedError as error:
            raise ProblemError(Kind.BAD_ENGINE_URL, str(error)) from error
        except NameRefusedError as error:
            raise ProblemError(Kind.BAD_NAME, str(error)) from error
        name = engine.id or engine_id(url)
        if name in self._tasks or any(record.url == url for record in self._ledger.engines.values()):
            raise ProblemError(Kind.ENGINE_EXISTS, f"engine {name} ({url}) is known already")
        return self._start(EngineSpec(url=url, id=name, run=run), Source.API)

    def remove(self, name: str) -> None:
        """Let go of an engine that the API named. An update that is under way comes to its end first.

        Raises:
            ProblemError: there is none, or settings name it.
        """
        record = self._known(name)
        if record.source is not Source.API:
            where = (
                "--engine / REFITD_ENGINES" if record.source is Source.SETTINGS else f"the engines file {self._file}"
            )
            raise ProblemError(Kind.ENGINE_NOT_REMOVABLE, f"engine {name} is named by {where}: take it out there")
        self._ledger.drop_engine(name)

    async def trial(self, version: VersionRecord, engine: EngineRecord) -> str | None:
        """Ask an engine that serves a version for a few tokens; see `refitd.rollout.canary.Check`."""
        if engine.id not in self._replicas:
            return f"engine {engine.id} was removed"
        return await self._replicas[engine.id].trial(version)

    def resync(self, name: str) -> None:
        """Load an engine again.

        Raises:
            ProblemError: there is none.
        """
        self._known(name)
        if name in self._replicas:
            self._replicas[name].resync()

    def _known(self, name: str) -> EngineRecord:
        if name not in self._ledger.engines:
            raise ProblemError(Kind.UNKNOWN_ENGINE, f"no engine {name}: 'refitd engines' lists what there is")
        return self._ledger.engines[name]

    async def drain(self, grace: float) -> None:
        """Start nothing new, and let updates that are under way come to their end, at most `grace` seconds."""
        for replica in self._replicas.values():
            replica.stop()
        if tasks := set(self._tasks.values()):
            await asyncio.wait(tasks, timeout=grace)
