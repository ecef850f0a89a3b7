"""The composition root: every part is made here and handed what it needs; nothing reaches for a global.

Start: lock the root, open the journal, read it back, then run. Stop (SIGTERM): the API closes, updates that are under
way come to their end, then everything else ends; the journal is last.
"""

import asyncio
import gc
import random
import sys
from socket import socket
from typing import TYPE_CHECKING

import structlog

from refitd.catalog.catalog import Catalog
from refitd.catalog.files import DiskFiles
from refitd.catalog.references import References
from refitd.catalog.rules import CatalogRules
from refitd.catalog.warm import Warmer
from refitd.catalog.watch import Watcher, mounts_now, root_file_system
from refitd.clock import SystemClock
from refitd.copies.before_load import BeforeLoad
from refitd.copies.copier import Copier
from refitd.copies.disk import DiskCopies
from refitd.discovery.place import parse_place
from refitd.discovery.scout import Scout
from refitd.engine.connect import connector
from refitd.journal.recovery import open_journal
from refitd.ledger import Ledger
from refitd.logs import configure_logs
from refitd.notice.intake import Intake
from refitd.ownership import Hold, StartRefusedError, owned, state_owned
from refitd.preflight import stranger
from refitd.reclaim.collector import Collector, LedgerFacts
from refitd.reclaim.folders import DiskFolders
from refitd.rollout.canary import CanaryChecks, Check, OperatorCheck
from refitd.rollout.conductor import Conductor
from refitd.rollout.fleet import Fleet
from refitd.rollout.hosts import guard_of
from refitd.rollout.record import Source
from refitd.root_mark import RootGuard, mark_root
from refitd.root_threads import RootThreads
from refitd.settings import Settings
from refitd.state_folder import check_state_folder
from refitd.surface.api import build_api
from refitd.surface.context import Service
from refitd.surface.listening import listening
from refitd.surface.server import Server
from refitd.telemetry.otlp import tracing
from refitd.telemetry.telemetry import Telemetry
from refitd.webhooks.webhooks import Webhooks

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

DRAIN_SECONDS = 20.0
SWITCH_SECONDS = 0.0005

log = structlog.get_logger("refitd")


def serve(settings: Settings) -> int:
    """Run the service until SIGTERM or SIGINT; return the exit status."""
    configure_logs(settings.log_format)
    # Threads look at files and write the journal; the loop must not wait for its turn behind them (5 ms by default).
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with owned(settings.root) as hold:
            check_state_folder(settings.state_folder, named=settings.state is not None, mounts=mounts_now())
            with (
                state_owned(settings.state_folder),
                tracing(settings.otlp_endpoint) as tracer,
                listening(settings.host, settings.port) as sockets,
            ):
                asyncio.run(_serve(settings, hold, sockets, tracer))
    except StartRefusedError as error:
        log.error("refitd does not start", reason=str(error))
        return 1
    return 0


async def _serve(settings: Settings, hold: Hold, sockets: list[socket], tracer: "Tracer | None") -> None:
    journal = await asyncio.to_thread(open_journal, settings.state_folder, settings.root.resolve())
    try:
        ledger = await asyncio.to_thread(Ledger, journal, SystemClock(), settings.rollout_strategy)
        guard = await asyncio.to_thread(_root_guard, settings, ledger, hold)
        telemetry = Telemetry(ledger, tracer)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(journal.run(), name="journal")
            await _run(settings, ledger, guard, sockets, telemetry)
            telemetry.close()
            writing.cancel()
    finally:
        journal.close()
    log.info("stopped")


def _root_guard(settings: Settings, ledger: Ledger, hold: Hold) -> RootGuard:
    """Find out whether the root is the one that the journal is about."""
    root = settings.root.resolve()
    has_versions = bool(ledger.versions)
    mark = mark_root(root, ledger.origin.root, has_versions=has_versions, mounts=mounts_now())
    ledger.is_about(mark)
    guard = RootGuard(root, mark, hold.renew)
    if (fault := guard()) is not None:
        log.error("not ready", reason=fault)
    return guard


async def _run(
    settings: Settings, ledger: Ledger, guard: RootGuard, sockets: list[socket], telemetry: Telemetry
) -> None:
    root = settings.root.resolve()
    by_api = [engine.id for engine in ledger.engines.values() if engine.source is Source.API]
    if (doubt := await asyncio.to_thread(stranger, settings, by_api)) is not None:
        log.warning("the canary is not there", reason=doubt)
    threads = RootThreads()
    files = DiskFiles(root, guard, threads, settings.trainers)
    catalog = Catalog(ledger, files, References(ledger, settings.base_model, threads), CatalogRules.of(settings))
    copies = DiskCopies(root, settings.copies_folder, threads)
    copier = Copier(ledger, LedgerFacts(ledger, files), copies, most=settings.copies)
    warmer = Warmer(root, lambda: root_file_system(root), threads)
    before_load = BeforeLoad(catalog.check, copier, warmer, ledger.carriage)
    fleet = Fleet(
        ledger,
        root=settings.path_map or str(root),
        urls=settings.engines,
        engines_file=settings.engines_file,
        probe_interval=settings.probe_interval,
        connect=connector(settings, guard_of(settings, ledger)),
        check=before_load.check,
        warm=before_load.warm,
        chance=random.Random(),  # noqa: S311 - jitter, not a secret
        discovers=bool(settings.discover),
    )
    found = [engine.url for engine in ledger.engines.values() if engine.source is Source.DISCOVERED]
    scout = Scout([parse_place(text) for text in settings.discover], found, fleet.discovered, ledger.clock)
    checks: list[Check] = [fleet.trial]
    if settings.canary_check is not None:
        checks.append(OperatorCheck(settings.canary_check))
    canaries = CanaryChecks(ledger, checks)
    conductor = Conductor(ledger, default_run=settings.run, quorum=settings.quorum)
    collector = Collector(ledger, files, DiskFolders(root, threads), settings, copier)
    intake = Intake(
        ledger,
        files,
        root,
        catalog.nudge,
        settings.run,
        trainers=settings.trainers,
        kind=settings.kind,
        deltas=settings.takes_deltas,
    )
    watcher = Watcher(root, settings.watch, asyncio.get_running_loop(), catalog.nudge)
    service = Service(
        settings=settings,
        ledger=ledger,
        intake=intake,
        fleet=fleet,
        sweeper=collector.sweeper,
        copier=copier,
        telemetry=telemetry,
    )
    webhooks = await asyncio.to_thread(Webhooks, settings, ledger, telemetry)
    await copier.survey()  # before engines are asked: an engine goes straight to a copy that is there already
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it again would stop everything for 30 ms at a time
    # A part that fails takes the service down with it: one that goes on without its catalog would only look alive.
    async with asyncio.TaskGroup() as group:
        runs = (watcher.run, collector.run, catalog.run, conductor.run, canaries.run, copier.run, fleet.run, scout.run)
        runs += (telemetry.stops.run, webhooks.run)
        parts = [group.create_task(run(), name=run.__qualname__) for run in runs]
        await Server(build_api(service), settings.host, settings.port).serve(sockets)
        await fleet.drain(DRAIN_SECONDS)
        for part in parts:
            part.cancel()
