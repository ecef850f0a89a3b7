"""Routes of liveness, readiness and metrics, and what is wrong with the service.

The first two are open to everyone: they say nothing secret.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from refitd.api.context import Service, ServiceOf
from refitd.explain.present import steps_behind
from refitd.observe.telemetry import Telemetry, Unserved
from refitd.policy.readiness import not_ready, why_not_ready, why_rebuilding
from refitd.policy.traffic import Demand
from refitd.state.journal.journal import JournalError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd_client.contract.naming import installed_release
from refitd_client.contract.plugin import setting_fault
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Faults

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """200 while the event loop turns."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: ServiceOf) -> dict[str, str]:
    """200 while the journal can be written and the root can be listed.

    503 until the first listing of the root after a start, and while a lost journal is rebuilt.
    """
    await service.store.durable()
    if (why := why_not_ready(service.store)) is not None:
        raise not_ready(why)
    return {"status": "ready"}


async def faults_now(store: Store) -> Faults:
    """Return what is wrong with the journal, the root, the list of engines, and what lies in the root."""
    try:
        await store.journal.durable(told=True)
        store.journal.check()
    except JournalError as error:
        fault = f"{error}; {error.remedy}"
    else:
        fault = why_rebuilding(store)
    return faults_of(store, fault)


def faults_of(store: Store, journal: str | None) -> Faults:
    faults = store.faults
    return Faults(
        root=faults.root,
        engines=faults.engines,
        journal=journal,
        disk=faults.disk,
        folders=faults.folders,
        upstream=faults.upstream,
        push=faults.push,
        tls=faults.tls,
    )


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text format. `docs/metrics.md` lists what there is."""
    telemetry: Telemetry = request.app.state.telemetry
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)


class StoreCollector(Collector):
    """Makes metrics of the store, the targets and the sweeper."""

    def __init__(self, service: Service, unserved: Unserved) -> None:
        self._service = service
        self._store = service.store
        self._targets = service.targets
        self._unserved = unserved

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("refitd_build", "The release that runs", value={"version": installed_release()})
        yield self._faults()
        yield self._versions()
        what = "Folders of the root that are not taken in yet, because too many versions wait for a verdict"
        yield GaugeMetricFamily("refitd_folders_left_out", what, value=self._store.faults.folders_left_out)
        yield from self._of_engines()
        yield from self._each_engine()
        yield from self._of_runs()
        yield from self._bytes()
        skipped = sum(engine.contents.skipped for engine in self._store.engines.values())
        yield CounterMetricFamily("refitd_skipped_versions", "Good versions that engines passed over", value=skipped)
        yield CounterMetricFamily("refitd_events", "Entries in the log of decisions", value=self._store.last_event)

    def _faults(self) -> Metric:
        family = GaugeMetricFamily(
            "refitd_fault", "1 while something is wrong with a part of the service", labels=["part"]
        )
        for part, fault in asdict(faults_of(self._store, self._store.journal.fault)).items():
            family.add_metric([part], fault is not None)
        return family

    def _versions(self) -> Metric:
        family = GaugeMetricFamily("refitd_versions", "Versions by state", labels=["state"])
        counts = Counter(version.state for version in self._store.versions.values())
        counts[VersionState.DELETED] = len(self._store.gone)
        for state in VersionState:
            family.add_metric([state.value], counts[state])
        return family

    def _of_engines(self) -> Iterator[Metric]:
        engines = self._store.engines.values()
        family = GaugeMetricFamily("refitd_engines", "Engines by state", labels=["state"])
        counts = Counter(engine.state for engine in engines)
        for state in EngineState:
            family.add_metric([state.value], counts[state])
        yield family
        unknown = sum(not engine.known for engine in engines)
        yield GaugeMetricFamily(
            "refitd_engines_unknown_contents",
            "Engines that stay paused because their contents are unknown",
            value=unknown,
        )

    def _each_engine(self) -> Iterator[Metric]:
        """Yield metrics by engine, so that alerts name it; of its states only the present one."""
        labels = ["run", "engine"]
        state = GaugeMetricFamily(
            "refitd_engine_state", "1 for the state that an engine is in", labels=[*labels, "state"]
        )
        known = GaugeMetricFamily("refitd_engine_contents_known", "0 while its contents are unknown", labels=labels)
        loader = GaugeMetricFamily(
            "refitd_engine_through_loader",
            "1 while the plugin of an engine loads tensors through the server's loader: all of them, or some",
            labels=[*labels, "tensors"],
        )
        fault = GaugeMetricFamily(
            "refitd_engine_plugin_fault",
            "1 while refitd stands aside in an engine, because one of its variables there is wrong",
            labels=labels,
        )
        behind = GaugeMetricFamily(
            "refitd_staleness_steps",
            "The trainer's steps from what an engine serves to its run's target",
            labels=labels,
        )
        opened = GaugeMetricFamily(
            "refitd_engine_open", "1 while requests may go to an engine, however far it is behind", labels=labels
        )
        contests = GaugeMetricFamily(
            "refitd_engine_contests", "How often another writer has changed its weights or label lately", labels=labels
        )
        info = InfoMetricFamily(
            "refitd_engine", "What an engine's server is, and what proves the version that it serves", labels=labels
        )
        for engine in self._store.engines.values():
            of = [engine.run or "", engine.id]
            info.add_metric(of, _what_it_is(engine))
            contests.add_metric(of, engine.trouble.contests)
            state.add_metric([*of, engine.state.value], 1)
            known.add_metric(of, engine.known)
            opened.add_metric(of, self._targets.shut(engine, Demand()) is None)
            slow = engine.seen.loader
            loader.add_metric([*of, "all"], slow is not None and slow.whole)
            loader.add_metric([*of, "some"], slow is not None and not slow.whole)
            fault.add_metric(of, setting_fault(engine.seen.stock_reason) is not None)
            if (steps := steps_behind(engine, self._targets)) is not None:
                behind.add_metric(of, steps)
        yield from (state, known, opened, contests, loader, fault, behind, info)

    def _of_runs(self) -> Iterator[Metric]:
        target = GaugeMetricFamily("refitd_target_step", "Step that the run's engines should serve", labels=["run"])
        waiting = GaugeMetricFamily(
            "refitd_unserved_seconds", "Time for which the run's engines are on their way; 0 when there", labels=["run"]
        )
        paused = GaugeMetricFamily("refitd_updates_paused", "1 while an operator has paused the run", labels=["run"])
        for run in sorted(self._store.runs.followed_since):
            if (wanted := self._targets.of_run(run).target) is not None:
                target.add_metric([run], wanted.order.step)
            waiting.add_metric([run], self._unserved.seconds(run))
            update = self._store.updates.get(run)
            paused.add_metric([run], update is not None and update.paused_since is not None)
        yield from (target, waiting, paused)
        family = GaugeMetricFamily(
            "refitd_run_unfollowed", "1 while no engine follows a run that is not closed", labels=["run"]
        )
        runs = self._store.runs
        for run in sorted({version.run for version in self._store.versions.values()} - runs.closed.keys()):
            family.add_metric([run], run not in runs.followed_since)
        yield family

    def _bytes(self) -> Iterator[Metric]:
        held = sum(version.files.bytes or 0 for version in self._store.versions.values())
        yield GaugeMetricFamily("refitd_held_bytes", "Bytes of versions on disk", value=held)
        family = GaugeMetricFamily(
            "refitd_kept_bytes", "Bytes in the root by what they are, as of the last sweep", labels=["what"]
        )
        for what, size in self._service.sweeper.kept.items():
            family.add_metric([what.value], size)
        yield family


class LeaderCollector(Collector):
    """Makes the metrics of a service of a group. `epoch` gives the number of its lead, None while it stands by."""

    def __init__(self, epoch: Callable[[], int | None]) -> None:
        self._epoch = epoch

    def collect(self) -> Iterator[Metric]:
        epoch = self._epoch()
        what = "1 while this service leads its group, 0 while it stands by"
        yield GaugeMetricFamily("refitd_leader", what, value=epoch is not None)
        if epoch is not None:
            yield GaugeMetricFamily("refitd_epoch", "The number of the group's last takeover", value=epoch)


def _what_it_is(engine: EngineRecord) -> dict[str, str]:
    proof = engine.contents.proof if engine.known and engine.serving is not None else None
    return {
        "server": engine.seen.server,
        "release": engine.seen.server_version,
        "plugin": engine.seen.plugin or "",
        "proof": proof or "",
    }
