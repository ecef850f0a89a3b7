"""The composition root: every part is made here and handed what it needs; nothing reaches for a global."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from refitd.catalog.catalog import Catalog
from refitd.catalog.files import DiskFiles
from refitd.catalog.references import References
from refitd.catalog.rules import CatalogRules
from refitd.catalog.warm import Warmer
from refitd.catalog.watch import Watcher, root_file_system
from refitd.copies.before_load import BeforeLoad
from refitd.copies.copier import Copier
from refitd.copies.disk import DiskCopies
from refitd.discovery.place import parse_place
from refitd.discovery.scout import Scout
from refitd.engine.connect import connector
from refitd.engine.engines_file import EngineSpec
from refitd.engine.plugin.leading import Leads
from refitd.engine.port import Engine
from refitd.ledger import Ledger
from refitd.notice.intake import Intake
from refitd.reclaim.collector import Collector, LedgerFacts
from refitd.reclaim.folders import DiskFolders
from refitd.rollout.canary import CanaryChecks, Check, OperatorCheck
from refitd.rollout.conductor import Conductor
from refitd.rollout.fleet import Fleet
from refitd.rollout.hosts import guard_of, named_by_operator
from refitd.rollout.record import Source
from refitd.root_mark import RootGuard
from refitd.root_threads import RootThreads
from refitd.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What does the service's work. Each has a `run` that goes on until it is cancelled, but for the intake."""

    watcher: Watcher
    collector: Collector
    catalog: Catalog
    conductor: Conductor
    canaries: CanaryChecks
    copier: Copier
    fleet: Fleet
    scout: Scout
    intake: Intake

    @property
    def runs(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        """What has to run."""
        first = (self.watcher.run, self.collector.run, self.catalog.run, self.conductor.run)
        return (*first, self.canaries.run, self.copier.run, self.fleet.run, self.scout.run)


def compose(settings: Settings, ledger: Ledger, guard: RootGuard, leads: Leads | None = None) -> Parts:
    """Make them, with what plugins are told of who loads their engines. Call it on the event loop."""
    root, threads = settings.root.resolve(), RootThreads()
    files = DiskFiles(root, guard, threads, settings.trainers)
    catalog = Catalog(ledger, files, References(ledger, settings.base_model, threads), CatalogRules.of(settings))
    copies = DiskCopies(root, settings.copies_folder, threads)
    copier = Copier(ledger, LedgerFacts(ledger, files), copies, most=settings.copies)
    warmer = Warmer(root, lambda: root_file_system(root), threads)
    connect = connector(settings, guard_of(settings, ledger), named_by_operator(settings, ledger), leads)
    fleet = _fleet(settings, ledger, connect, BeforeLoad(catalog.check, copier, warmer, ledger.carriage))
    return Parts(
        watcher=Watcher(root, settings.watch, asyncio.get_running_loop(), catalog.nudge),
        collector=Collector(ledger, files, DiskFolders(root, threads), settings, copier),
        catalog=catalog,
        conductor=Conductor(ledger, default_run=settings.run, quorum=settings.quorum),
        canaries=_canaries(settings, ledger, fleet),
        copier=copier,
        fleet=fleet,
        scout=_scout(settings, ledger, fleet),
        intake=_intake(settings, ledger, files, catalog),
    )


def _fleet(
    settings: Settings, ledger: Ledger, connect: Callable[[EngineSpec], Engine], before_load: BeforeLoad
) -> Fleet:
    return Fleet(
        ledger,
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


def _canaries(settings: Settings, ledger: Ledger, fleet: Fleet) -> CanaryChecks:
    checks: list[Check] = [fleet.trial]
    if settings.canary_check is not None:
        checks.append(OperatorCheck(settings.canary_check))
    return CanaryChecks(ledger, checks)


def _scout(settings: Settings, ledger: Ledger, fleet: Fleet) -> Scout:
    found = [engine.url for engine in ledger.engines.values() if engine.source is Source.DISCOVERED]
    return Scout([parse_place(text) for text in settings.discover], found, fleet.discovered, ledger.clock)


def _intake(settings: Settings, ledger: Ledger, files: DiskFiles, catalog: Catalog) -> Intake:
    return Intake(
        ledger,
        files,
        settings.root.resolve(),
        catalog.nudge,
        settings.run,
        trainers=settings.trainers,
        kind=settings.kind,
        deltas=settings.takes_deltas,
    )
