"""The service from its start to its end; its parts are made in `parts`.

Start: lock the root, open the journal, read it back, then run. Stop (SIGTERM): the API closes, updates that are under
way come to their end, then everything else ends; the journal is last.
"""

import asyncio
import gc
import os
import sys
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

import structlog

from refitd.api.api import build_api
from refitd.api.context import Service
from refitd.api.listening import listening
from refitd.api.server import Server
from refitd.clock import SystemClock
from refitd.diagnose.preflight import keys_without_token, stranger
from refitd.engine.plugin.leading import Leads, leads_of
from refitd.observe.logs import configure_logs
from refitd.observe.otlp import tracing
from refitd.observe.telemetry import Telemetry
from refitd.observe.webhooks.webhooks import Webhooks
from refitd.parts import Parts, compose
from refitd.rollout.targets import Targets
from refitd.root.file_systems import mounts_now
from refitd.root.mark import RootGuard, mark_root
from refitd.root.ownership import Hold, StartRefusedError, owned, state_owned
from refitd.root.state_folder import check_state_folder
from refitd.settings import Settings
from refitd.state.journal.recovery import open_journal
from refitd.state.records import Source
from refitd.state.store import Store
from refitd_client.transport.ipc.secret import make_secret

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

DRAIN_SECONDS = 20.0
SWITCH_SECONDS = 0.0005

_NOT_ROOT = "run it as a user that may write to the root and the state folder, and nothing else (docs/deploy.md)"
_CLOSE_IT = "set --token-file (REFITD_TOKEN_FILE) unless every user of this machine may change engines"

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
                if os.geteuid() == 0:
                    log.warning("refitd runs as root and need not", advice=_NOT_ROOT)
                asyncio.run(_serve(settings, hold, sockets, tracer))
    except StartRefusedError as error:
        log.error("refitd does not start", reason=str(error))
        return 1
    return 0


async def _serve(settings: Settings, hold: Hold, sockets: list[socket], tracer: "Tracer | None") -> None:
    journal = await asyncio.to_thread(open_journal, settings.state_folder, settings.root.resolve())
    try:
        store = await asyncio.to_thread(Store, journal, SystemClock())
        targets = Targets(store, settings.rollout_strategy)
        guard = await asyncio.to_thread(_root_guard, settings, store, hold)
        telemetry = Telemetry(store, tracer)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(journal.run(), name="journal")
            await _run(settings, store, targets, guard, sockets, telemetry)
            telemetry.close()
            writing.cancel()
    finally:
        journal.close()
    log.info("stopped")


def _make_secret(root: Path) -> None:
    """Without one nothing is handed over from memory, and nothing else is the worse for it."""
    try:
        make_secret(root)
    except OSError as error:
        log.warning("no secret for hand-overs from memory", reason=str(error))


def _leads(settings: Settings) -> Leads | None:
    """Without a name of its own a service leads no engine, and nothing else is the worse for it."""
    try:
        return leads_of(settings.root.resolve(), settings.state_folder, settings.probe_interval)
    except OSError as error:
        log.warning("engines with the plugin are not told who leads them", reason=str(error))
        return None


def _root_guard(settings: Settings, store: Store, hold: Hold) -> RootGuard:
    """Find out whether the root is the one that the journal is about."""
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
    sockets: list[socket],
    telemetry: Telemetry,
) -> None:
    await _warn_of_strangers(settings, store)
    if (exposed := await asyncio.to_thread(keys_without_token, settings)) is not None:
        log.warning("--insecure: engines can be changed without a token", reason=exposed, advice=_CLOSE_IT)
    await asyncio.to_thread(_make_secret, settings.root.resolve())
    parts = compose(settings, store, targets, guard, await asyncio.to_thread(_leads, settings))
    webhooks = await asyncio.to_thread(lambda: Webhooks(settings.webhook_rules, store, targets, telemetry))
    await parts.copier.survey()  # before engines are asked: an engine goes straight to a copy that is there already
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it again would stop everything for 30 ms at a time
    api = build_api(_surface(settings, store, targets, parts, telemetry))
    # A part that fails takes the service down with it: one that goes on without its catalog would only look alive.
    async with asyncio.TaskGroup() as group:
        runs = (*parts.runs, telemetry.stops.run, webhooks.run)
        tasks = [group.create_task(run(), name=run.__qualname__) for run in runs]
        await Server(api, settings.host, settings.port).serve(sockets)
        await parts.fleet.drain(DRAIN_SECONDS)
        for task in tasks:
            task.cancel()


async def _warn_of_strangers(settings: Settings, store: Store) -> None:
    by_api = [engine.id for engine in store.engines.values() if engine.source is Source.API]
    if (doubt := await asyncio.to_thread(stranger, settings, by_api)) is not None:
        log.warning("the canary is not there", reason=doubt)


def _surface(settings: Settings, store: Store, targets: Targets, parts: Parts, telemetry: Telemetry) -> Service:
    return Service(
        settings=settings,
        store=store,
        targets=targets,
        intake=parts.intake,
        fleet=parts.fleet,
        sweeper=parts.collector.sweeper,
        copier=parts.copier,
        telemetry=telemetry,
    )
