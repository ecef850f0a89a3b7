"""What the routes work with: the parts of the service, as ports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol

from fastapi import Depends, Request

from refitd.materialize.materializer import Materializer
from refitd.observe.telemetry import Telemetry
from refitd.policy.lines import KeptFor
from refitd.rollout.targets import Targets
from refitd.settings import Settings
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.wire import NewEngine, Notice, ReclaimPlan


class IntakePort(Protocol):
    """Takes notices."""

    async def take(self, notice: Notice) -> tuple[VersionRecord, bool]:
        """The version of a notice, and whether it is new. Raises ProblemError."""
        ...


class FleetPort(Protocol):
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


class SweeperPort(Protocol):
    """Collects versions."""

    @property
    def kept(self) -> Mapping[KeptFor, int]:
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
    """The parts of the running service. Without `telemetry` only the API is measured."""

    settings: Settings
    store: Store
    targets: Targets
    intake: IntakePort
    fleet: FleetPort
    sweeper: SweeperPort
    materializer: Materializer | None = None
    telemetry: Telemetry | None = None


async def _service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_service)]
