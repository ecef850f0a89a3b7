"""The port to a kind of server: which calls it takes, what its replies mean, and what it can do.

A dialect sends and reads. What comes next `transaction.py` decides, alike for all servers.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from refitd.engine.http import NoReply, Transport
from refitd.engine.plugin.client import PluginClient
from refitd.engine.port import ChangeCheck, Obstacle, Reached, Target, Unreached
from refitd.engine.replies import Loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is known of a server's contents right before a load.

    Attributes:
        fingerprint: of what it holds, by which a refusal is proved; None where it cannot tell.
        again: what can be loaded and proved again when the load fails; None where that is not known.
    """

    fingerprint: str | None = None
    again: Target | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a server shows of its contents.

    Attributes:
        fingerprint: of what it holds; None where it cannot tell.
        fault: why it does not serve the target, whatever its fingerprint is; None where nothing speaks against it.
        overwritten: the fault shows that another program has loaded or labelled something since.
        once_resumed: asks for the evidence that only a server gives that generates; None where there is none. Where
            it finds a fault it pauses the server again.
    """

    fingerprint: str | None = None
    fault: str | None = None
    overwritten: bool = False
    once_resumed: "Callable[[], Awaitable[Shown]] | None" = None


class Dialect(Protocol):
    """One server, as its kind is spoken to. No call raises for what a server does.

    Attributes:
        http: to the server.
        settles_by: a route that is answered by the loop that loads, so that the answer shows that no load runs.
        plugin_minds_all: whether refitd's plugin in the server has a part also in loads that it does not carry out.
        each_rank_answers: whether each rank answers an update for itself; else the first of each data-parallel one.
    """

    http: Transport
    settles_by: str
    plugin_minds_all: bool
    each_rank_answers: bool

    @property
    def is_known(self) -> bool:
        """Whether a probe has learned how the server was started."""
        ...

    @property
    def lost(self) -> str | None:
        """Why nothing counts any more that this process of the server answers; None where it does."""
        ...

    async def probe(self) -> Reached | Unreached:
        """As for `EnginePort`, without what refitd's plugin in the server makes of it."""
        ...

    async def find_plugin(self, plugin: PluginClient) -> None:
        """Find the ranks of refitd's plugin in the server that was probed."""
        ...

    def stock_reason(self, found: str | None) -> str | None:
        """Why its loads are the server's own. `found`: what the search for refitd's ranks says, None for nothing."""
        ...

    def obstacles(self, *, plugged: bool) -> Iterable[Obstacle]:
        """What is in the way of updates, the worst first. `plugged`: refitd's plugin has a part in them."""
        ...

    async def left_alone(self) -> str | None:
        """Why it is not updated now, though it can be; None where it is."""
        ...

    async def hold(
        self, target: Target, pausing: AbstractContextManager[None], within: float, *, plugged: bool
    ) -> Before | NoReply | str:
        """Have it compute nothing, and learn what it holds; or why that did not go well.

        Args:
            target: what it is to load then.
            pausing: counts the time of the pause.
            within: seconds that requests in flight may take where they are to end.
            plugged: refitd's plugin answers for the load, so that nothing has to be known of the contents.
        """
        ...

    async def load(self, target: Target, within: float, *, plugged: bool) -> Loading:
        """Have it load; what that did. `within` seconds, `plugged` as for `hold`."""
        ...

    async def untouched(self, before: Before) -> Shown:
        """Whether it holds what it held before, after it has refused."""
        ...

    async def verify(self, target: Target, answered: str | None) -> Shown:
        """Bring caches and names to what was loaded, and ask what it holds.

        Args:
            target: what was loaded.
            answered: the fingerprint in the plugin's answers, which is proof; None where no plugin has loaded.
        """
        ...

    def serves(self, target: Target, fingerprint: str | None) -> None:
        """Note that the target was proved."""
        ...

    async def contents(self, alike: str | None) -> str | None:
        """The fingerprint by the server's own means, as for `EnginePort.fingerprint`."""
        ...

    async def trial(self, label: str) -> str | None:
        """As for `EnginePort`."""
        ...

    async def resume(self) -> bool:
        """As for `EnginePort`."""
        ...

    async def check_changes(self) -> ChangeCheck:
        """As for `EnginePort`."""
        ...


def refusal(found: Iterable[Obstacle]) -> str | None:
    """Why a server is not updated, in a sentence; None where nothing blocks it."""
    first = next((each for each in found if each.blocks), None)
    return None if first is None else f"{first.text}: {first.fix}"
