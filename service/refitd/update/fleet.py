"""The engines: which there are, and a reconciler for each.

Settings, the engines file, the API and discovery name them; the store remembers them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

import structlog

from refitd.engine.address import AddressRefusedError, check_engine_id, check_url, engine_id
from refitd.engine.port import EnginePort
from refitd.engine.registry import EnginesFile, EngineSpec, named_engines
from refitd.policy.admit import Prove
from refitd.policy.roster import NamedEngine, reconcile
from refitd.problem import ProblemError, Slug
from refitd.state.records import EngineRecord, Source, given_back, unvouched
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.controller import Tell
from refitd.update.proving import RankProofs
from refitd.update.reconciler import EngineReconciler, FileAccess, FilesCheck
from refitd.update.targets import Targets
from refitd_client.contract.naming import InvalidNameError, check_run
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import NewEngine

FILE_LOOK_SECONDS = 2.0

log = structlog.get_logger("refitd")


async def proved_already(_: VersionRecord) -> bool:
    return True


class Fleet:
    def __init__(
        self,
        store: Store,
        targets: Targets,
        *,
        root: str,
        urls: list[str],
        engines_file: Path | None,
        probe_interval: float,
        connect: Callable[[EngineSpec], EnginePort],
        check: FilesCheck,
        chance: random.Random,
        prove: Callable[[VersionRecord], Awaitable[bool]] = proved_already,
        proofs: RankProofs | None = None,
        discovers: bool = False,
    ) -> None:
        """Do nothing yet.

        Args:
            root: the root as engines see it.
            urls: the engines that the settings name, as `URL` or `KIND=URL`.
            engines_file: the engines file, None without one.
            probe_interval: seconds from one probe to the next.
            connect: makes an engine's adapter.
            check: looks at a version's files right before a load.
            chance: for jitter.
            prove: has the service read a version that GPUs of other engines have proved.
            proofs: hears what engines' GPUs prove; None where they prove nothing.
            discovers: whether `discovered` will be called with more engines.
        """
        self._store = store
        self._targets = targets
        self._root = root
        self.discovers = discovers
        self._has_found = False
        self._urls = urls
        # After an error what was read before stays in force: a slip in an editor removes no engine.
        self._file = None if engines_file is None else EnginesFile(engines_file, self._complain)
        self._has_read = False
        self._probe_interval = probe_interval
        self.connect = connect
        self.check = check
        self._prove = prove
        self._proofs = proofs or RankProofs(store, targets, Prove.SERVICE)
        self._chance = chance
        self._group: asyncio.TaskGroup | None = None
        self._named: dict[str, NamedEngine] = {}
        self._running: dict[str, EngineSpec] = {}
        self._reconcilers: dict[str, EngineReconciler] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Lets go of a host until it reports again, and names those that are left.
        self.forget_host: Callable[[str], None] = lambda _: None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._name(named_engines(self._urls), Source.SETTINGS)
            added = [record for record in self._store.engines.values() if record.naming.source is Source.API]
            self._name({record.id: _spec_of(record) for record in added}, Source.API)
            if self._file is None:
                self._name({}, Source.FILE)
                self._has_read = True
            known = [r for r in self._store.engines.values() if self.discovers and r.naming.source is Source.DISCOVERED]
            self._name({record.id: _spec_of(record) for record in known}, Source.DISCOVERED)
            while True:
                await self._follow_file()
                self._admit()
                self._catch_up()
                await asyncio.sleep(FILE_LOOK_SECONDS)

    def _name(self, specs: dict[str, EngineSpec], source: Source) -> None:
        """Replace what a source named before by what it names now."""
        others = {name: entry for name, entry in self._named.items() if entry.source is not source}
        mine = {name: NamedEngine(spec, source) for name, spec in specs.items()}
        roster = reconcile(self._store.engines, mine, frozenset({source}))
        self._named = others | mine
        for name in roster.drop:
            self._store.drop_engine(name)
        for record in roster.keep:
            self._take(record)
        self._catch_up()

    def _take(self, record: EngineRecord) -> None:
        if record.id in self._store.engines:
            self._store.put_engine(record)
            return
        record = given_back(record, self._store.removed.get(record.url))
        if self._store.origin.lost and not self._store.origin.rebuilt:
            record = unvouched(record)
        self._store.put_engine(record, "added")

    def _catch_up(self) -> None:
        """Start what is named and does not run; stop, after its action, what runs by an older entry."""
        for name, entry in self._named.items():
            if name not in self._tasks:
                self._start(name, entry.spec)
            elif self._running[name] != entry.spec:
                self._reconcilers[name].stop()

    def _start(self, name: str, spec: EngineSpec) -> None:
        if self._group is None:
            raise ProblemError(Slug.NOT_READY, "the service is starting: try again")
        adapter = self.connect(spec)
        self._running[name] = spec
        self._reconcilers[name] = EngineReconciler(
            name,
            adapter,
            self._store,
            self._targets,
            files=FileAccess(seen_path=partial(self._seen_path, spec), check=self.check, prove=self._prove),
            proofs=self._proofs,
            probe_interval=self._probe_interval,
            chance=self._chance,
        )
        self._tasks[name] = self._group.create_task(self._keep(name, adapter), name=f"reconciler {name}")

    def _seen_path(self, spec: EngineSpec, version: VersionRecord, *, in_place: bool = False) -> str | None:
        """Where an engine finds a version's files; None for a delta that it does not take in place and no copy holds
        now.
        """
        path = version.path if in_place else self._targets.carriage.path_of(version)
        return path if path is None or path.startswith("/") else f"{spec.root or self._root}/{path}"

    async def _keep(self, name: str, adapter: EnginePort) -> None:
        try:
            await self._reconcilers[name].run()
        finally:
            await adapter.aclose()
            del self._reconcilers[name], self._running[name], self._tasks[name]

    async def _follow_file(self) -> None:
        if self._file is None:
            return
        specs = await asyncio.to_thread(self._file.news)
        self._store.faults.set(engines_file=self._file.fault)
        if specs is not None:
            self._has_read = True
            self._name({spec.id or engine_id(spec.url): spec for spec in specs}, Source.FILE)

    def _admit(self) -> None:
        """Clear the fault of the fleet once every source has named its engines."""
        faults = self._store.faults
        if not self._has_read and self._file is not None:
            faults.set(fleet=self._file.fault)
        elif self.discovers and not self._has_found:
            faults.set(fleet=faults.discovery or "engines are being looked for")
        else:
            faults.set(fleet=None)

    def discovered(self, urls: Collection[str], fault: str | None) -> None:
        """Replace what was discovered before by `urls`. Engines that another source names stay as they are."""
        self._store.faults.set(discovery=fault)
        self._has_found = self._has_found or fault is None
        if self._group is None:
            return
        self._found({engine_id(url): EngineSpec(url=url) for url in urls}, Source.DISCOVERED)
        self._admit()

    def reported(self, specs: dict[str, EngineSpec]) -> None:
        """Replace the hosts that have named themselves, by id. Engines that another source names stay as they are."""
        if self._group is not None:
            self._found(specs, Source.REPORTED)

    def _found(self, specs: dict[str, EngineSpec], source: Source) -> None:
        others = {name: entry for name, entry in self._named.items() if entry.source is not source}
        taken = {entry.spec.url for entry in others.values()}
        new = {name: spec for name, spec in specs.items() if spec.url not in taken and name not in others}
        if {name: entry.spec for name, entry in self._named.items() if entry.source is source} != new:
            self._name(new, source)

    def _complain(self, fault: str) -> None:
        log.error("the engines file cannot be used", error=fault)

    def add(self, engine: NewEngine) -> str:
        """Take in an engine that the API names; return its id.

        Raises:
            ProblemError: the URL cannot be used, or the engine is known already.
        """
        try:
            url = check_url(engine.url)
            run = None if engine.run is None else check_run(engine.run)
            name = engine_id(url) if engine.id is None else check_engine_id(engine.id)
        except AddressRefusedError as error:
            raise ProblemError(Slug.BAD_ENGINE_URL, str(error)) from error
        except InvalidNameError as error:
            raise ProblemError(Slug.BAD_NAME, str(error)) from error
        if name in self._tasks or any(record.url == url for record in self._store.engines.values()):
            raise ProblemError(Slug.ENGINE_EXISTS, f"engine {name} ({url}) is known already")
        spec = EngineSpec(url=url, id=name, run=run)
        if self._group is None:
            raise ProblemError(Slug.NOT_READY, "the service is starting: try again")
        self._named[name] = NamedEngine(spec, Source.API)
        for record in reconcile(self._store.engines, {name: self._named[name]}, frozenset()).keep:
            self._take(record)
        self._start(name, spec)
        return name

    def remove(self, name: str) -> None:
        """Remove an engine that the API named, or a host that does not report. An update that is under way ends first.

        Raises:
            ProblemError: there is none, or settings name it, or it is a host that reports.
        """
        record = self._known(name)
        if record.naming.source is not Source.API:
            where = "--engine / REFITD_ENGINES"
            if self._file is not None and record.naming.source is Source.FILE:
                where = f"the engines file {self._file.path}"
            if record.naming.source is Source.DISCOVERED:
                where = "a place of --discover / REFITD_DISCOVER"
            if record.naming.source is Source.REPORTED:
                self._remove_host(record)
                return
            raise ProblemError(Slug.ENGINE_NOT_REMOVABLE, f"engine {name} is named by {where}: take it out there")
        self._named.pop(name, None)
        self._store.drop_engine(name)

    def _remove_host(self, record: EngineRecord) -> None:
        if record.state is not EngineState.UNREACHABLE:
            text = f"the host {record.id} names itself by its reports, and would come back with the next one"
            fix = "stop the refitd there (or take its --follow away), and remove it here when it is UNREACHABLE"
            raise ProblemError(Slug.ENGINE_NOT_REMOVABLE, f"{text}: {fix}")
        self.forget_host(record.id)

    async def trial(self, version: VersionRecord, engine: EngineRecord, _: Tell) -> str | None:
        """Ask an engine that serves a version for a few tokens; see `refitd.update.controller.CanaryCheck`."""
        if engine.id not in self._reconcilers:
            return f"engine {engine.id} was removed"
        return await self._reconcilers[engine.id].trial(version)

    def resync(self, name: str) -> None:
        """Load an engine again.

        Raises:
            ProblemError: there is none, or what it serves cannot be loaded again, and what could be is older.
        """
        record = self._known(name)
        serving = self._store.versions.get(record.serving or "")
        fault = None if serving is None or not record.known else self._why_not_again(serving)
        if serving is not None and fault is not None:
            older = self._targets.of_run(serving.run).loadable
            if self._targets.of_engine(record.having(reload=True)).loadable is None:
                back = "" if older is None else f"; a resync would take it back to {older.id}"
                now = f"engine {name} serves {serving.id}, {fault}{back}"
                raise ProblemError(Slug.VERSION_NOT_GOOD, f"{now}: publish a newer step, or roll back")
        self._try_again(record.run)
        if name in self._reconcilers:
            self._reconcilers[name].resync()

    def _why_not_again(self, version: VersionRecord) -> str | None:
        """Why a version that an engine serves cannot be loaded again, now or soon; None where it can be."""
        if version.state is VersionState.LOST:
            return "whose files are lost"
        if version.in_memory:
            return "which has no good files"
        carriage = self._targets.carriage
        refused = None if carriage.can_load(version) else carriage.refused.get(version.id)
        return None if refused is None else f"which cannot be carried out ({refused})"

    def _try_again(self, run: str | None) -> None:
        """Have what this host has given up tried once more, where its upstream goes on wanting it: no other command
        would. A service that follows none has its trainer publish a newer version.
        """
        store = self._store
        wanted = store.versions.get(store.runs.desired.get(run or "", ""))
        if wanted is None or wanted.career.given_up is None or store.runs.upstream is None:
            return
        again = wanted.having(barred=False, reason=None, given_up=None)
        store.put_version(again, "is tried once more: a resync was asked for")
        for engine in store.engines_of(wanted.run):  # what speaks against it is over: loads, and a check that failed
            if wanted.id in engine.trouble.strikes:
                store.put_engine(
                    engine.having(strikes={v: n for v, n in engine.trouble.strikes.items() if v != wanted.id})
                )
        update = store.updates.get(wanted.run)
        if update is not None and update.version == wanted.id:
            store.start_update(wanted.run, wanted.id, "a resync was asked for")

    def _known(self, name: str) -> EngineRecord:
        if name not in self._store.engines:
            raise ProblemError(Slug.UNKNOWN_ENGINE, f"no engine {name}: 'refitd engines' lists what there is")
        return self._store.engines[name]

    async def drain(self, grace: float) -> None:
        """Start nothing new, and wait for updates that are under way, at most `grace` seconds."""
        for reconciler in self._reconcilers.values():
            reconciler.stop()
        if tasks := set(self._tasks.values()):
            await asyncio.wait(tasks, timeout=grace)


def _spec_of(record: EngineRecord) -> EngineSpec:
    """The engine as its source named it, as far as the journal knows. A move is not said by its source."""
    said = record.naming.said if record.naming.moved else record.run if record.naming.run_named else None
    return EngineSpec(url=record.url, id=record.id, run=said)
