"""The composition root: every part is made here and handed what it needs; nothing reaches for a global."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from refitd.catalog.catalog import Catalog
from refitd.catalog.files import DiskFiles
from refitd.catalog.intake import Intake
from refitd.catalog.references import References
from refitd.catalog.warm import Warmer
from refitd.catalog.watch import Watcher
from refitd.discovery.place import parse_place
from refitd.discovery.scout import Scout
from refitd.engine.connect import connector
from refitd.engine.engines_file import EngineSpec
from refitd.engine.plugin.leading import Leads
from refitd.engine.port import Engine
from refitd.materialize.before_load import BeforeLoad
from refitd.materialize.disk import DiskCopies
from refitd.materialize.materializer import Copier
from refitd.policy.hosts import guard_of, named_by_operator
from refitd.reclaim.collector import Collector, StoreFacts
from refitd.reclaim.folders import DiskFolders
from refitd.rollout.canary import CanaryChecks, Check, OperatorCheck
from refitd.rollout.controller import RolloutController
from refitd.rollout.fleet import Fleet
from refitd.rollout.targets import Targets
from refitd.root.file_systems import root_file_system
from refitd.root.mark import RootGuard
from refitd.root.threads import RootThreads
from refitd.settings import Settings
from refitd.state.records import Source
from refitd.state.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What does the service's work. Each has a `run` that goes on until it is cancelled, but for the intake."""

    watcher: Watcher
    collector: Collector
    catalog: Catalog
    controller: RolloutController
    canaries: CanaryChecks
    copier: Copier
    fleet: Fleet
    scout: Scout
    intake: Intake

    @property
    def runs(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """What has to run."""
        first = (self.watcher.run, self.collector.run, self.catalog.run, self.controller.run)
        return (*first, self.canaries.run, self.copier.run, self.fleet.run, self.scout.run)


def compose(settings: Settings, store: Store, targets: Targets, guard: RootGuard, leads: Leads | None = None) -> Parts:
    """Make them, with what plugins are told of who loads their engines. Call it on the event loop."""
    root, threads = settings.root.resolve(), RootThreads()
    files = DiskFiles(root, guard, threads, settings.trainers)
    catalog = Catalog(store, files, References(store, settings.base_model, threads), settings.catalog_rules)
    copies = DiskCopies(root, settings.copies_folder, threads)
    facts = StoreFacts(store, targets, files, catalog.judging)
    copier = Copier(store, targets, facts, copies, most=settings.copies)
    warmer = Warmer(root, lambda: root_file_system(root), threads)
    connect = connector(
        settings.engine_access,
        guard_of(settings.operator_hosts, store.engines),
        named_by_operator(settings.operator_hosts, store.engines),
        leads,
    )
    fleet = _fleet(settings, store, targets, connect, BeforeLoad(catalog.check, copier, warmer, targets.carriage))
    return Parts(
        watcher=Watcher(root, settings.watch, asyncio.get_running_loop(), catalog.nudge),
        collector=Collector(store, facts, DiskFolders(root, threads), settings.reclaim_rules, copier),
        catalog=catalog,
        controller=RolloutController(store, targets, default_run=settings.run, quorum=settings.quorum),
        canaries=_canaries(settings, store, targets, fleet),
        copier=copier,
        fleet=fleet,
        scout=_scout(settings, store, fleet),
        intake=_intake(settings, store, targets, files, catalog),
    )


def _fleet(
    settings: Settings,
    store: Store,
    targets: Targets,
    connect: Callable[[EngineSpec], Engine],
    before_load: BeforeLoad,
) -> Fleet:
    return Fleet(
        store,
        targets,
        root=settings.path_map or str(settings.root.resolve()),
        urls=settings.engines,
        engines_file=settings.engines_file,
        probe_interval=settings.probe_interval,
        connect=connect,
        check=before_load.check,
        warm=before_load.warm,
        chance=random.Random(),  # noqa: S311 - jitter, not a secret
        discovers=bool(settings.discover),
    )


def _canaries(settings: Settings, store: Store, targets: Targets, fleet: Fleet) -> CanaryChecks:
    checks: list[Check] = [fleet.trial]
    if settings.canary_check is not None:
        checks.append(OperatorCheck(settings.canary_check))
    return CanaryChecks(store, targets, checks)


def _scout(settings: Settings, store: Store, fleet: Fleet) -> Scout:
    found = [engine.url for engine in store.engines.values() if engine.source is Source.DISCOVERED]
    return Scout([parse_place(text) for text in settings.discover], found, fleet.discovered, store.clock)


def _intake(settings: Settings, store: Store, targets: Targets, files: DiskFiles, catalog: Catalog) -> Intake:
    return Intake(
        store,
        targets,
        files,
        settings.root.resolve(),
        catalog.nudge,
        settings.run,
        trainers=settings.trainers,
        kind=settings.kind,
        deltas=settings.takes_deltas,
    )
