"""What is done right before a load, whatever kind of version it is: a last look at the files, and reading ahead."""

from collections.abc import Awaitable, Callable

from refitd.catalog.warm import Warmer
from refitd.materialize.materializer import Copier
from refitd.policy.loadable import Carriage
from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind


class BeforeLoad:
    """Full versions, and deltas that are written in place, are looked at in their own folders, other deltas in the
    copies that hold them.
    """

    def __init__(
        self, full: Callable[[VersionRecord], Awaitable[bool]], copier: Copier, warmer: Warmer, carriage: Carriage
    ) -> None:
        """`full` looks at a full version."""
        self._full = full
        self._copier = copier
        self._warmer = warmer
        self._carriage = carriage

    async def check(self, version: VersionRecord, *, in_place: bool = False) -> bool:
        """As `refitd.rollout.reading.Check`."""
        is_copy = version.kind is Kind.DELTA and not in_place
        return await (self._copier.check(version) if is_copy else self._full(version))

    async def warm(self, version: VersionRecord) -> None:
        """Have those files in memory. A copy was written just now, or is worth a read by the kernel."""
        path = self._carriage.path_of(version)
        if path is not None and not path.startswith("/"):
            await self._warmer.warm(path)
