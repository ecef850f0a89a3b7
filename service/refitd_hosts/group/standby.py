"""A service of a group, from its start to its lead: it stands by until it leads, and then gets the group's journal.

    /healthz   200
    /readyz    503, with who leads: load balancers send requests to the leader alone
    /metrics   `refitd_leader 0`
    others     503 `not-leading`, with who leads: the SDK goes on to the next service that it was given

It asks for the lead several times a second. It goes on answering so until it can act: a former leader's time is over,
and the journal was read.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import structlog
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from refitd.api import errors
from refitd.api.api import door_of
from refitd.api.auth import Door, Gate
from refitd.api.health import LeaderCollector
from refitd.api.server import Address, Server
from refitd.observe.logs import announce
from refitd.problem import ProblemError, Slug
from refitd.root.ownership import StartRefusedError
from refitd.settings import Settings, group_of
from refitd.state.journal.journal import Journal
from refitd_hosts.group.address import PostgresAddress
from refitd_hosts.group.journal import connect, open_group_journal, why_unusable
from refitd_hosts.group.leadership import Candidate, HeldLead, Leader, monotonic
from refitd_hosts.options import GroupSettings

POLL_SECONDS = 0.25
_LAST_ANSWER_SECONDS = 1.0
RETRY_AFTER = {"Retry-After": "1"}

log = structlog.get_logger("refitd")


@dataclass
class StandbyView:
    """What this service knows of its group: who leads, and why the database cannot be asked. None where unknown."""

    leader: Leader | None = None
    fault: str | None = None

    @property
    def problem(self) -> ProblemError:
        if self.fault is not None:
            detail = f"this service stands by, and cannot ask its group's database: {self.fault}"
        elif self.leader is None:
            detail = "this service stands by, and no service of its group leads yet"
        else:
            detail = f"this service stands by: {self.leader.address} leads since {self.leader.since}"
        return ProblemError(Slug.NOT_LEADING, detail, RETRY_AFTER)


def build_standby(view: StandbyView, door: Door) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    registry = CollectorRegistry()
    registry.register(LeaderCollector(lambda: None))
    errors.install(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def rest(request: Request, path: str) -> Response:
        return errors.response(view.problem, request.url.path)

    app.add_middleware(Gate, door=door)
    _ = (healthz, metrics, rest)
    return app


class StandbyServer(Server):
    """Serves until the service leads. Signals are `standing_by`'s; the sockets stay open for the leader's server."""

    close_seconds = 1

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def listens(self, url: str) -> None:
        announce(f"refitd stands by on {url}")


class Standby:
    """A service that stands by. `lead` waits for the lead. `refuses` says why the database cannot be used."""

    def __init__(self, candidate: Candidate, view: StandbyView, refuses: Callable[[], str | None]) -> None:
        self._candidate, self._view, self._refuses = candidate, view, refuses
        self.stopped = asyncio.Event()

    async def lead(self) -> HeldLead | None:
        """Wait until this service leads its group; None where it is to stop. A StartRefusedError says that the database
        cannot hold a group's journal.
        """
        while not self.stopped.is_set():
            if (lead := await self._tried()) is not None:
                if not self.stopped.is_set():
                    return lead
                await asyncio.to_thread(lead.release)
            await self.wait(POLL_SECONDS)
        await asyncio.to_thread(self._candidate.close)
        return None

    async def wait(self, seconds: float) -> bool:
        """Wait so long; return False where the service is to stop before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self.stopped.wait()
        return not self.stopped.is_set()

    async def _tried(self) -> HeldLead | None:
        """Try once. A database that says nothing must not hold up a stop."""
        trying, stopped = asyncio.create_task(self._try()), asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({trying, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({trying}, timeout=_LAST_ANSWER_SECONDS)
            if not trying.done():
                self._candidate.interrupt()
            return await trying
        finally:
            stopped.cancel()

    async def _try(self) -> HeldLead | None:
        import psycopg

        try:
            if self._view.leader is None and (why := await asyncio.to_thread(self._refuses)) is not None:
                raise StartRefusedError(why)
            lead = await asyncio.to_thread(self._candidate.try_to_lead)
            leader = await asyncio.to_thread(self._candidate.leader) if lead is None else lead.leader
        except psycopg.Error as error:
            fault = " ".join(str(error).split())
            if self._view.fault is None:
                log.warning("the group's database cannot be asked", reason=fault)
            self._view.fault = fault
            return None
        self._view.leader, self._view.fault = leader, None
        return lead


@asynccontextmanager
async def standing_by(standby: Standby, app: FastAPI, host: str, port: int, at: Address) -> AsyncGenerator[None]:
    """Answer on the sockets as long as the context lasts; they stay open. SIGTERM and SIGINT set `standby.stopped`."""
    loop = asyncio.get_running_loop()
    server = StandbyServer(app, host, port, tls=at.tls)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, standby.stopped.set)
    serving = asyncio.create_task(server.serve([each.dup() for each in at.sockets]), name="standby")
    serving.add_done_callback(lambda _: standby.stopped.set())
    watching = None if at.tls is None else asyncio.create_task(at.tls.watch(lambda _: None), name="certificate")
    try:
        yield
    finally:
        server.should_exit = True
        if watching is not None:
            watching.cancel()
        await serving
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


_EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - it is compared


class ServiceGroup:
    """The group of services that share a database. As `refitd.composition.GroupPort`."""

    def __init__(self, settings: Settings, database: PostgresAddress) -> None:
        self._settings, self._database = settings, database

    async def lead(self, at: Address) -> tuple[HeldLead, Journal] | None:
        settings, database = self._settings, self._database
        candidate = Candidate(database, advertised(settings, at.port), group_of(settings, GroupSettings).lease)
        view = StandbyView()

        standby = Standby(candidate, view, partial(_why_refused, database))
        async with standing_by(standby, build_standby(view, door_of(settings)), settings.host, settings.port, at):
            lead = await standby.lead()
            if lead is None:
                return None
            try:
                journal = await asyncio.to_thread(open_group_journal, database, lead, settings.root.resolve())
                if await standby.wait(lead.acts_at - monotonic()):
                    log.info("this service leads its group", epoch=lead.epoch, address=lead.leader.address)
                    return lead, journal
                journal.close()
            except BaseException:
                lead.release()
                raise
            lead.release()
            return None


def advertised(settings: Settings, port: int) -> str:
    """The URL by which clients reach this service: the operator's word, else its address and port."""
    if (named := group_of(settings, GroupSettings).advertise) is not None:
        return named
    host = socket.gethostname() if settings.host in _EVERY_ADDRESS else settings.host
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _why_refused(database: PostgresAddress) -> str | None:
    with connect(database) as connection:
        why = why_unusable(connection)
    return None if why is None else f"the database {database.shown} cannot hold a group's journal: {why}"
