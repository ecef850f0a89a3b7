"""The parts of a service before they run, and where a ring adds its own."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from refitd.api.context import Service
from refitd.api.server import Address
from refitd.catalog.catalog import Catalog
from refitd.catalog.intake import Intake
from refitd.engine.plugin import Leads
from refitd.reclaim.books import Books
from refitd.reclaim.sweep import Collector
from refitd.root.handle import RootThreads
from refitd.root.ownership import RootGuard
from refitd.settings import Settings
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets
from refitd_client.contract.wire import GroupLead

Run = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The parts of the core. A ring changes them as they allow, and appends to `runs`.

    Attributes:
        root: the folder that trainers publish into, resolved.
        guard: says why what is at the root's path is not the root.
        leads: what plugins hear of the service that loads their engines; None for a service without a name.
        port: the one that the service listens on.
        api: what routes use.
        runs: go on until they are cancelled.
    """

    settings: Settings
    root: Path
    guard: RootGuard
    threads: RootThreads
    store: Store
    targets: Targets
    catalog: Catalog
    books: Books
    collector: Collector
    intake: Intake
    fleet: Fleet
    leads: Leads | None
    port: int
    api: Service
    runs: list[Run] = field(default_factory=list[Run])


Compose = Callable[[Composition], Awaitable[None]]


class LeadPort(Protocol):
    """The lead of a group, for as long as this service has it."""

    @property
    def shown(self) -> GroupLead:
        """What others are told of it."""
        ...

    @property
    def service(self) -> str:
        """The group's name."""
        ...

    @property
    def epoch(self) -> int:
        """Grows with each takeover."""
        ...

    def why_not(self) -> str | None:
        """Why this service does not lead any more; None while it leads."""
        ...

    def release(self) -> None:
        """Let another service take over at once."""
        ...


class GroupPort(Protocol):
    """The group that a service belongs to."""

    async def lead(self, at: Address) -> tuple[LeadPort, Journal] | None:
        """Stand by until this service leads and may act; None where it is to stop before.

        Raises:
            StartRefusedError: the group's journal cannot be used.
        """
        ...


FindGroup = Callable[[Settings], GroupPort | None]
"""Returns the group of a service; None for a service alone."""
