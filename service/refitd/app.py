"""The service from its start to its end, and the composition root: every part is made here and handed what it needs.

Start: lock the root, open the journal, read it back, then run. Stop (SIGTERM): the API closes, updates under way come
to their end, then everything else ends; the journal is last.
"""

import asyncio
import gc
import os
import random
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import structlog

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.api.server import Address, Server, listening, server_tls
from refitd.catalog.catalog import Catalog, Watcher
from refitd.catalog.examining import References
from refitd.catalog.files import DiskFiles
from refitd.catalog.intake import Intake
from refitd.clock import SystemClock
from refitd.composition import Composition, FindGroup, GroupPort, LeadPort
from refitd.engine.plugin import Leads
from refitd.engine.registry import connector
from refitd.engine.wire import Guard
from refitd.memory import share_arenas
from refitd.observe.logs import configure_logs
from refitd.observe.telemetry import Telemetry, tracing
from refitd.parts import registered
from refitd.policy.roster import guard_of, named_by_operator
from refitd.preflight import keys_without_token, stranger, why_unread
from refitd.reclaim.books import Books
from refitd.reclaim.folders import DiskFolders
from refitd.reclaim.sweep import Collector
from refitd.root.handle import RootThreads
from refitd.root.ownership import (
    Hold,
    RootGuard,
    StartRefusedError,
    check_state_folder,
    mark_root,
    mounts_now,
    owned,
    state_owned,
)
from refitd.settings import Settings
from refitd.state.decisions import DecisionFile
from refitd.state.journal.journal import Journal
from refitd.state.journal.recovery import open_journal
from refitd.state.records import Source
from refitd.state.store import Store
from refitd.update.controller import CanaryCheck, CanaryChecks, OperatorCheck, UpdateController, service_leads
from refitd.update.fleet import Fleet
from refitd.update.proving import RankProofs
from refitd.update.targets import Targets
from refitd_client.http.connection import use

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


DRAIN_SECONDS = 20.0
SWITCH_SECONDS = 0.0005
GC_THRESHOLDS = (20_000, 20, 20)  # 700 by default: hundreds of looks for cycles in an update of a thousand engines

_NOT_ROOT = "run it as a user that may write to the root and the state folder, and nothing else (docs/deploy.md)"
_CLOSE_IT = "set --token-file (REFITD_TOKEN_FILE) unless every user of this machine may change engines"

log = structlog.get_logger("refitd")


def serve(settings: Settings, *, json: bool = False) -> int:
    """Run the service until SIGTERM or SIGINT; return the exit status. `json`: log in JSON on a terminal too."""
    configure_logs("json" if json else "auto")
    share_arenas()
    gc.set_threshold(*GC_THRESHOLDS)
    # Threads look at files and write the journal; the loop must not wait for its turn behind them (5 ms by default).
    sys.setswitchinterval(SWITCH_SECONDS)
    use(settings.client_tls)
    try:
        tls = server_tls(settings.tls_files)
        group = _group_of(settings)
        registered("compose")  # imported before the loop runs: a takeover does not wait for imports
        with ExitStack() as opened:
            # Services of a group share the root and have no state folder: which of them acts is settled between them.
            hold = opened.enter_context(owned(settings.root, shared=group is not None))
            if group is None:
                check_state_folder(settings.state_folder, named=settings.state is not None, mounts=mounts_now())
                opened.enter_context(state_owned(settings.state_folder))
            tracer = opened.enter_context(tracing())
            sockets = opened.enter_context(listening(settings.host, settings.port))
            _warn()
            asyncio.run(_serve(settings, hold, Address(sockets=sockets, tls=tls), tracer, group))
    except StartRefusedError as error:
        log.error("refitd does not start", reason=str(error))
        return 1
    return 0


def _group_of(settings: Settings) -> GroupPort | None:
    """The group that this service belongs to; None for a service alone.

    Raises:
        StartRefusedError: it belongs to one, and cannot take part.
    """
    found: list[FindGroup] = list(registered("group"))
    return next((group for find in found if (group := find(settings)) is not None), None)


def _warn() -> None:
    if os.geteuid() == 0:
        log.warning("refitd runs as root and need not", advice=_NOT_ROOT)
    if (reason := why_unread(os.environ)) is not None:
        log.warning("a variable does nothing", reason=reason)


async def _serve(settings: Settings, hold: Hold, at: Address, tracer: "Tracer | None", group: GroupPort | None) -> None:
    if group is None:
        journal = await asyncio.to_thread(open_journal, settings.state_folder, settings.root.resolve())
        await _act(settings, hold, at, tracer, journal)
        return
    led = await group.lead(at)
    if led is None:
        log.info("stopped")
        return
    lead, journal = led
    try:
        await _act(settings, hold, at, tracer, journal, lead)
    finally:
        lead.release()


async def _act(
    settings: Settings,
    hold: Hold,
    at: Address,
    tracer: "Tracer | None",
    journal: Journal,
    lead: LeadPort | None = None,
) -> None:
    """Do the service's work until it is to stop. Closes the journal."""
    try:
        store = await asyncio.to_thread(Store, journal, SystemClock(), 0 if lead is None else lead.epoch)
        targets = Targets(store, settings.strategy)
        guard = await asyncio.to_thread(_root_guard, settings, store, hold)
        telemetry = Telemetry(store, tracer)
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(journal.run(), name="journal")
            await _run(settings, store, targets, guard, at, telemetry, lead)
            telemetry.close()
            writing.cancel()
    finally:
        journal.close()
    log.info("stopped")


def _root_guard(settings: Settings, store: Store, hold: Hold) -> RootGuard:
    """Find out whether the root is the one that the journal is about, and return what goes on checking it."""
    root = settings.root.resolve()
    has_versions = bool(store.versions)
    mark = mark_root(root, store.origin.root, has_versions=has_versions, mounts=mounts_now())
    store.is_about(mark)
    guard = RootGuard(root, mark, hold.renew)
    if (fault := guard()) is not None:
        log.error("not ready", reason=fault)
    return guard


async def _run(
    settings: Settings,
    store: Store,
    targets: Targets,
    guard: RootGuard,
    at: Address,
    telemetry: Telemetry,
    lead: LeadPort | None,
) -> None:
    if lead is not None:
        store.say("group", "group", f"{lead.shown.address} leads the group, with epoch {lead.epoch}", epoch=lead.epoch)
    by_api = [engine.id for engine in store.engines.values() if engine.naming.source is Source.API]
    if (doubt := await asyncio.to_thread(stranger, settings, by_api)) is not None:
        log.warning("the canary is not there", reason=doubt)
    if (exposed := await asyncio.to_thread(keys_without_token, settings)) is not None:
        log.warning("--insecure: engines can be changed without a token", reason=exposed, advice=_CLOSE_IT)
    group = None if lead is None else (lead.service, lead.epoch)
    state_folder, interval = settings.state_folder, settings.probe_interval
    leads = await asyncio.to_thread(service_leads, store, settings.root, state_folder, interval, group)
    parts = compose(settings, store, targets, guard, telemetry=telemetry, leads=leads, port=at.port, lead=lead)
    for add in registered("compose"):
        await add(parts)
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it again would stop everything for 30 ms at a time
    api = build_api(parts.api)
    # A part that fails takes the service down with it: one that goes on without its catalog would only look alive.
    async with asyncio.TaskGroup() as group:
        runs = (*parts.runs, telemetry.stops.run)
        tasks = [group.create_task(run(), name=run.__qualname__) for run in runs]
        if at.tls is not None:
            tasks.append(group.create_task(at.tls.watch(lambda why: store.faults.set(tls=why)), name="certificate"))
        await Server(api, settings.host, settings.port, tls=at.tls).serve(at.sockets)
        await parts.fleet.drain(DRAIN_SECONDS)
        for task in tasks:
            task.cancel()


def compose(
    settings: Settings,
    store: Store,
    targets: Targets,
    guard: RootGuard,
    *,
    telemetry: Telemetry,
    leads: Leads | None = None,
    port: int = 0,
    lead: LeadPort | None = None,
) -> Composition:
    """Make every part of the core and hand it what it needs. Call it on the event loop.

    Args:
        guard: says why what is at the root's path is not the root.
        leads: what plugins hear of the service that loads their engines.
        port: the one that the service listens on.
        lead: of its group; no engine is called when that is over. None for a service alone.
    """
    root, threads = settings.root.resolve(), RootThreads()
    files = DiskFiles(root, guard, threads, settings.trainers)
    proofs = RankProofs(store, targets, settings.prove)
    references = References(store, settings.base_model, threads)
    catalog = Catalog(store, files, references, settings.catalog_rules, proofs)
    decisions = DecisionFile(store, root, threads.run)
    store.observe(decisions)
    books = Books(store, targets, files, catalog.judging)
    fleet = Fleet(
        store,
        targets,
        root=settings.path_map or str(root),
        urls=settings.engines,
        engines_file=settings.engines_file,
        probe_interval=settings.probe_interval,
        connect=connector(
            settings.engine_access,
            _while_leading(lead, guard_of(settings.operator_hosts, store.engines)),
            named_by_operator(settings.operator_hosts, store.engines),
            leads,
        ),
        check=catalog.check,
        prove=catalog.read,
        proofs=proofs,
        chance=random.Random(),  # noqa: S311 - jitter, not a secret
    )
    checks: list[CanaryCheck] = [fleet.trial]
    if settings.canary_check is not None:
        checks.append(OperatorCheck(settings.canary_check))
    collector = Collector(store, books, DiskFolders(root, threads), settings.reclaim_rules)
    intake = Intake(
        store,
        targets,
        files,
        root,
        catalog.nudge,
        settings.run,
        trainers=settings.trainers,
        kind=settings.kind,
        deltas=settings.takes_deltas,
    )
    return Composition(
        settings=settings,
        root=root,
        guard=guard,
        threads=threads,
        store=store,
        targets=targets,
        catalog=catalog,
        books=books,
        collector=collector,
        intake=intake,
        fleet=fleet,
        leads=leads,
        port=port,
        api=Service(
            values=settings.api_values,
            store=store,
            targets=targets,
            intake=intake,
            fleet=fleet,
            sweeper=collector.sweeper,
            telemetry=telemetry,
            decisions=decisions,
            leader=None if lead is None else lead.shown,
        ),
        runs=[
            Watcher(root, asyncio.get_running_loop(), catalog.nudge).run,
            collector.run,
            catalog.run,
            decisions.run,
            UpdateController(store, targets, default_run=settings.run, quorum=settings.quorum).run,
            CanaryChecks(store, targets, checks).run,
            fleet.run,
        ],
    )


def _while_leading(lead: LeadPort | None, guard: Guard) -> Guard:
    """The guard of calls to engines; it also refuses each call of a service that does not lead its group any more."""
    if lead is None:
        return guard
    return lambda host, address: lead.why_not() or guard(host, address)
