"""What a sweep asks of the store and of the root, and what it writes into the store."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from refitd.catalog.files import DiskFiles
from refitd.policy.goals import last_good
from refitd.policy.leases import EngineView, Load, RunView, Views
from refitd.policy.readiness import Withheld, waits_for
from refitd.root.scan import FoundFolder, Listing, ListingFailed
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.naming import version_folder
from refitd_client.contract.states import EngineState, VersionState


class Books:
    """The store and the root, as a sweep asks about them and writes into them. No answer is kept for the next step.

    A change takes effect in memory at once.
    """

    def __init__(
        self,
        store: Store,
        targets: Targets,
        files: DiskFiles,
        judging: Collection[str] = (),
        *,
        pulling: Callable[[], Iterable[tuple[str, str]]] = tuple,
        upstream: Callable[[], Collection[str]] = frozenset,
        pushing: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Read nothing yet.

        Args:
            judging: the ids of the versions that the catalog looks at now. The set may change; each call reads it.
            pulling: which version (its id) each follower pulls, by the follower's name.
            upstream: the ids of versions that must stay since the upstream wants them.
            pushing: the ids of versions whose files are read for an object store.
        """
        self.pulling = pulling
        self.upstream = upstream
        self.pushing = pushing
        self._store = store
        self._targets = targets
        self._files = files
        self._judging = judging

    def versions(self) -> Sequence[VersionRecord]:
        return list(self._store.versions.values())

    def gone(self) -> Collection[str]:
        return self._store.gone

    def views(self) -> Views:
        """What leases are derived from."""
        versions = self._store.versions.values()
        validating = {version.id for version in versions if version.state is VersionState.VALIDATING}
        validating.update(self._judging)
        runs = tuple(self._run(run) for run in sorted({version.run for version in versions}))
        copying = tuple(sorted(self._targets.copying))
        return Views(
            engines=tuple(self._engines()),
            runs=runs,
            validating=tuple(sorted(validating)),
            copying=copying,
            pulling=tuple(self.pulling()),
            upstream=tuple(sorted(self.upstream())),
            pushing=tuple(sorted(self.pushing())),
        )

    def _engines(self) -> Iterator[EngineView]:
        named = cache(self._named)  # a thousand engines name a few paths
        for engine in self._store.engines.values():
            yield self._engine(engine, named)
        for name, attempt in self._store.loading.items():
            if name not in self._store.engines:  # removed during a load: it reads to the end
                yield EngineView(id=name, run=None, state=EngineState.UPDATING, loads=(Load(version=attempt.version),))
        for engine in self._store.removed.values():
            yield replace(self._engine(engine, named), is_removed=True, named=())

    def _run(self, run: str) -> RunView:
        goals = self._targets.of_run(run)
        target, next_, good = goals.wanted, goals.loadable, last_good(self._store.versions_of(run))
        update = self._store.updates.get(run)
        rolling = update is not None and update.state.is_under_way
        return RunView(
            run=run,
            target=None if target is None else target.id,
            loadable=None if next_ is None else next_.id,
            last_good=None if good is None else good.id,
            is_closed=run in self._store.runs.closed,
            rolling_back=rolling
            and target is not None
            and any(v.barred and v.order > target.order for v in self._store.versions_of(run)),
        )

    def _engine(self, engine: EngineRecord, named: Callable[[str], list[str]]) -> EngineView:
        since = engine.trouble.unreachable_since
        loads: list[Load] = []
        if attempt := self._store.loading.get(engine.id):
            loads.append(Load(version=attempt.version, since=attempt.started_at))
        # What failed was our knowledge of these loads, not necessarily the loads.
        loads += [Load(version=version, unproven=True) for version in engine.debts.unproven]
        return EngineView(
            id=engine.id,
            run=engine.run,
            state=engine.state,
            serving=engine.serving,
            loads=tuple(loads),
            named=tuple(id_ for path in engine.paths for id_ in named(path)),
            beneath=engine.contents.beneath,
            unreachable_for=0.0 if since is None else self._store.clock.monotonic() - since,
        )

    def _named(self, model_path: str) -> list[str]:
        """Versions that an engine may mean by a path. It may see the root elsewhere, so the path's end counts."""
        return [v.id for v in self._store.versions.values() if model_path.endswith(f"/{v.path}")]

    def rebuilding(self) -> str | None:
        return waits_for(self._store)

    async def listing(self) -> Listing | ListingFailed | Withheld:
        """Scan the root, and add the versions whose folders have names of their own.

        Withheld while nothing may be deleted, whatever lies in the root. A listing without a folder that is there has
        failed.
        """
        if (missing := self.rebuilding()) is not None:
            return Withheld(f"the journal was lost and is being rebuilt: {missing}")
        listing = await self._files.scan()
        if isinstance(listing, ListingFailed):
            return listing
        listed = {found.path for found in listing.found}
        others = [version for version in self.versions() if version.path not in listed]
        there = await self._files.signatures([version.path for version in others])
        extra = [version for version in others if there[version.path] is not None]
        for version in extra:
            if version.path == f"{version.run}/{version_folder(version.order)}":
                return ListingFailed(f"{version.path} is there and was not listed")
        found = tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in extra)
        return Listing(listing.found + found, listing.runs)

    def retire(self, record: VersionRecord, why: str) -> None:
        """Make a version RETIRED: no update, rollback or delta begins to use it."""
        # The files of a bad version go; the reason why it was bad stays.
        was_bad = (record.state.is_bad or record.state is VersionState.UNKNOWN) and record.reason is not None
        reason = f"{why}; it was {record.state}: {record.reason}" if was_bad else why
        retired = record.having(
            state=VersionState.RETIRED,
            reason=reason,
            state_before=record.state,
            reason_before=record.reason,
        )
        self._store.put_version(retired, f"retired: {why}")

    def deleted(self, record: VersionRecord) -> None:
        """Make a version DELETED: its folder is gone from its place."""
        self._store.put_version(replace(record, state=VersionState.DELETED), "deleted")

    def sized(self, version: str, size: int) -> None:
        """Remember how many bytes the folder of a version takes that was not found good."""
        self._store.put_version(self._store.versions[version].having(bytes=size))

    def aged(self, version: str, seconds: float) -> None:
        self._store.put_version(self._store.versions[version].having(bad_for=seconds))

    def budgeted(self, fault: str | None) -> None:
        """Set or clear the fault that what is kept does not fit the disk budget, and log the change."""
        before = self._store.faults.disk
        self._store.faults.set(disk=fault)
        if fault is not None and before is None:
            self._store.say("root", "root", fault, is_fault=True)
        elif fault is None and before is not None:
            self._store.say("root", "root", "all that is kept fits the disk budget again")

    async def durable(self) -> None:
        """Wait until all that was written is on disk. Raises JournalError."""
        await self._store.durable()
