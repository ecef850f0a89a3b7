"""What the routes work with, handed to them by the composition root."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request

from refitd.catalog.record import VersionRecord
from refitd.copies.copier import Copier
from refitd.ledger import Ledger
from refitd.reclaim.kept import Kept
from refitd.settings import Settings
from refitd.telemetry.telemetry import Telemetry
from refitd_client.contract.wire import NewEngine, Notice, ReclaimPlan


class Intake(Protocol):
    """Takes notices."""

    async def take(self, notice: Notice) -> tuple[VersionRecord, bool]:
        """The version of a notice, and whether it is new. Raises ProblemError."""
        ...


class Fleet(Protocol):
    """Owns the engines."""

    def add(self, engine: NewEngine) -> str:
        """Take an engine in; return its id. Raises ProblemError."""
        ...

    def remove(self, name: str) -> None:
        """Let go of an engine. Raises ProblemError."""
        ...

    def resync(self, name: str) -> None:
        """Load an engine again. Raises ProblemError."""
        ...


class Sweeper(Protocol):
    """Collects versions."""

    @property
    def kept(self) -> Mapping[Kept, int]:
        """Bytes that the last run left in the root, by what for."""
        ...

    async def plan(self) -> ReclaimPlan:
        """What would be done."""
        ...

    async def run(self) -> ReclaimPlan:
        """Do it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The parts of the running service. Without `telemetry` the API measures itself, and nobody the rest."""

    settings: Settings
    ledger: Ledger
    intake: Intake
    fleet: Fleet
    sweeper: Sweeper
    copier: Copier | None = None
    telemetry: Telemetry | None = None


async def _service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_service)]
