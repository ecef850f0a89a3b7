"""What is said of an engine that is a host. The core says nothing: a ring that has hosts does."""

from collections.abc import Iterable
from functools import cache

from refitd.parts import registered
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.store import Store
from refitd.update.targets import Targets


class HostWords:
    """Each is None of an engine that is no host, and where there is nothing to say."""

    def does(self, engine: EngineRecord, store: Store) -> str | None:
        """What a host does for its engines now, a sentence without a subject."""
        return None

    def shares_name(self, engine: EngineRecord) -> str | None:
        """That two hosts report by an engine's name, and what helps, a sentence."""
        return None

    def unknown(self, engine: EngineRecord, store: Store, targets: Targets) -> str | None:
        """That a host has a version which this service does not have, and what helps, without a subject."""
        return None

    def about(self, engine: EngineRecord, order: AttemptRecord | None, store: Store, targets: Targets) -> Iterable[str]:
        """Who does what for a host's engines, and which of them are not where they should be. `order` is the order that
        it is carrying out.
        """
        return ()


@cache
def host_words() -> HostWords:
    return next(iter(registered("words")), HostWords)()
