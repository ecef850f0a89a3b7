"""Engines in JSON, each encoded again when it has changed: of a thousand, few change between two reads."""

from collections.abc import Iterable

import msgspec

from refitd.explain.present import present_engine, why_now
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.update.targets import Targets


class Fragments:
    """The last JSON of each engine, and what it was made of: objects none of which ever changes in itself, and why the
    engine is where it is, which may also change with its host and the upstream.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[tuple[object, ...], str | None, msgspec.Raw]] = {}

    def of(self, engines: Iterable[EngineRecord], store: Store, targets: Targets) -> list[msgspec.Raw]:
        """Return engines as the API shows them, in the order given.

        Args:
            engines: the engines, as they are now.
            store: what the service knows.
            targets: what engines are to serve.
        """
        if len(self._made) > 2 * len(store.engines):
            self._made = {name: made for name, made in self._made.items() if name in store.engines}
        return [self._fragment(engine, store, targets) for engine in engines]

    def _fragment(self, engine: EngineRecord, store: Store, targets: Targets) -> msgspec.Raw:
        made_of = (
            engine,
            store.versions.get(engine.serving or ""),
            targets.target_of(engine.run),
            store.away_since.get(engine.id),
        )
        known, why = self._made.get(engine.id), why_now(engine, store, targets)
        if known is not None and known[1] == why and all(a is b for a, b in zip(known[0], made_of, strict=True)):
            return known[2]
        fragment = msgspec.Raw(msgspec.json.encode(present_engine(engine, store, targets)))
        self._made[engine.id] = (made_of, why, fragment)
        return fragment
