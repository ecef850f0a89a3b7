"""Hosts that report to this service as their upstream: which of them it leads, and which it takes as engines by itself.

A follower that says where it can be called is taken as an engine of the kind that drives another refitd, if the
operator allows that. It stays for `GONE_SECONDS` after its last report, also over a restart of the service, and then
goes, unless another source names it. Whether its address may be called is decided as for any engine.
"""

import asyncio
from dataclasses import dataclass

import structlog

from refitd.clock import Clock
from refitd.engine.address import AddressRefusedError, check_engine_id, check_url, engine_id, host_of
from refitd.engine.dialing import Guard, refused
from refitd.engine.engines_file import EngineSpec
from refitd.engine.kind import HOST_KIND
from refitd.rollout.fleet import Fleet
from refitd.state.records import Source
from refitd.state.store import Store
from refitd_client.contract.follow import FollowerReport
from refitd_client.contract.naming import InvalidNameError
from refitd_client.contract.states import EngineState

GONE_SECONDS = 600.0
LOOK_SECONDS = 5.0

log = structlog.get_logger("refitd")


@dataclass(slots=True)
class _Reported:
    """An engine as its first report names it, and when (monotonic seconds) the last one came."""

    spec: EngineSpec
    at: float


class ReportedHosts:
    """The hosts that have reported. `leader` is the name by which this service's orders are known."""

    def __init__(self, store: Store, fleet: Fleet, clock: Clock, guard: Guard, *, takes: bool, leader: str) -> None:
        """Do nothing yet.

        Args:
            store: what the service knows.
            fleet: takes and drops engines.
            clock: the time.
            guard: says which addresses may be called.
            takes: whether hosts are taken as engines by their reports.
            leader: the name by which this service's orders are known.
        """
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._guard = guard
        self._takes = takes
        self.leader = leader
        self._known: dict[str, _Reported] = {}
        self._refused: dict[str, str] = {}

    async def reported(self, report: FollowerReport) -> None:
        """A follower has reported: take it as an engine, if it may be and is none yet."""
        if not self._takes or report.url is None or not report.engines:
            return
        try:
            url = check_url(report.url)
        except AddressRefusedError as error:
            self._refuse(report.url, str(error))
            return
        known = self._known.get(url)
        if known is not None:
            known.at = self._clock.monotonic()
            return
        if (reason := await refused(host_of(url), self._guard)) is not None:
            self._refuse(url, reason)
            return
        spec = EngineSpec(url=url, id=self._name_of(report, url), run=report.run, engine=HOST_KIND)
        self._known[url] = _Reported(spec, self._clock.monotonic())
        self._tell()

    def _name_of(self, report: FollowerReport, url: str) -> str:
        try:
            name = check_engine_id(report.follower)
        except InvalidNameError:
            return engine_id(url)
        taken = self._store.engines.get(name)
        return name if taken is None or taken.url == url or taken.source is Source.REPORTED else engine_id(url)

    def _refuse(self, url: str, reason: str) -> None:
        if self._refused.get(url) != reason:
            self._refused[url] = reason
            log.warning("a follower is not taken as an engine", url=url, reason=reason)

    def leads(self, report: FollowerReport) -> bool:
        """Whether this service orders what a follower serves: it is one of its engines, or may turn out to be one that
        was named and never asked yet.
        """
        for engine in self._store.engines.values():
            if engine.host is not None and engine.host.follower == report.follower:
                return True
            if report.url is not None and engine.url == report.url.rstrip("/"):
                return True
        return any(
            spec.engine == HOST_KIND and self._store.engines[name].state is EngineState.PROBING
            for name, spec in self._fleet.specs.items()
            if name in self._store.engines
        )

    async def run(self) -> None:
        """Drop hosts that have not reported for long, until cancelled."""
        now = self._clock.monotonic()
        for record in self._store.engines.values():
            if self._takes and record.source is Source.REPORTED:
                said = record.said if record.moved else record.run if record.run_named else None
                spec = EngineSpec(url=record.url, id=record.id, run=said, engine=HOST_KIND)
                self._known[record.url] = _Reported(spec, now)
        self._tell()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock.monotonic()
            gone = [url for url, known in self._known.items() if now - known.at > GONE_SECONDS]
            for url in gone:
                del self._known[url]
            if gone:
                self._tell()

    def _tell(self) -> None:
        self._fleet.reported({known.spec.id or url: known.spec for url, known in self._known.items()})
