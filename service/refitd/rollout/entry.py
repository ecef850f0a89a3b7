"""One engine in the ledger, as its replica sees it: its record as long as it is named, and when what may be tried."""

import random
from dataclasses import replace

from refitd.journal.journal import JournalError
from refitd.ledger import Ledger
from refitd.rollout.backoff import backoff
from refitd.rollout.plan import Agenda, Goals
from refitd.rollout.record import EngineRecord
from refitd_client.contract.states import EngineState


class RemovedError(Exception):
    """The engine is nobody's any more."""


class Entry:
    """The entry of the engine that is named `engine_id` now: another one of that name is not meant."""

    def __init__(self, engine_id: str, ledger: Ledger, chance: random.Random) -> None:
        self.id, self.ledger = engine_id, ledger
        self.agenda = Agenda()
        self._is_there = False  # whether it was counted as behind what it serves
        self._url = ledger.engines[engine_id].url
        self._chance = chance

    @property
    def record(self) -> EngineRecord:
        """The engine as it is now. It may have been removed at any await: then whatever is under way ends here.

        Raises:
            RemovedError: it was.
        """
        if not self.is_named:
            raise RemovedError
        return self.ledger.engines[self.id]

    @property
    def is_named(self) -> bool:
        """Whether it was not removed."""
        record = self.ledger.engines.get(self.id)
        return record is not None and record.url == self._url

    def unless_removed(self, after: EngineRecord) -> None:
        """The load of an engine that was removed meanwhile has ended: nobody else will say what it has left there.

        Raises:
            RemovedError: it was.
        """
        if not self.is_named:
            self.ledger.leave(after)
            raise RemovedError

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return self.ledger.clock.monotonic()

    def later(self, times: int) -> float:
        """When to try again what has failed so many times."""
        return self.now + backoff(times, self._chance)

    @property
    def goals(self) -> Goals:
        """What the engine could be brought to."""
        record = self.record.to_load
        goals = self.ledger.goals_of(record)
        candidates = (goals.target, goals.loadable, goals.last_good)
        recorded = frozenset(v.id for v in candidates if v is not None and self.fingerprint_of(v.id) is not None)
        return replace(goals, recorded=recorded)

    @property
    def target_id(self) -> str | None:
        """The version that it is to serve."""
        target = self.goals.target
        return None if target is None else target.id

    def fingerprint_of(self, version: str) -> str | None:
        """What a clean load of a version left in engines of this one's configuration."""
        return self.ledger.fingerprint(version, self.record.configuration or "")

    def arrive(self) -> None:
        """A rollback may have made what it serves the target again: it is asked at once whether it still does."""
        record = self.record.to_load
        is_there = (
            record.state is EngineState.BEHIND and record.serving is not None and record.serving == self.target_id
        )
        if is_there and not self._is_there:  # once: a probe that is not answered is tried again in its time
            self.agenda = replace(self.agenda, probe_at=self.now)
        self._is_there = is_there

    def put(self, before: EngineRecord, after: EngineRecord) -> None:
        """Write down what has become of it, and tell what is news."""
        _ = self.record
        if before.how_it_loads != after.how_it_loads:
            self.ledger.say("engine", self.id, after.how_it_loads, state=after.state.value)
        changed = (before.state, before.serving, before.reason) != (after.state, after.serving, after.reason)
        self.ledger.put_engine(after, _sentence(after) if changed else None)

    async def written(self) -> str | None:
        """Wait until what was put is durable; why it is not, None where it is."""
        try:
            await self.ledger.durable()
        except JournalError as error:
            return str(error)
        return None


def _sentence(engine: EngineRecord) -> str:
    contents = engine.of_others or "start-up weights" if engine.known else "unknown contents"
    serves = engine.serves(engine.serving or contents)
    return f"{engine.state}: {serves}" + (f" ({engine.reason})" if engine.reason else "")
