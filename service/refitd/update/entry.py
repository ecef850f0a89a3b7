"""One engine in the store, as its reconciler sees it: its record while it is named, and when what may be tried."""

import math
import random
from collections.abc import Mapping
from dataclasses import replace

from refitd.engine.fingerprints import agree, means_of, proof_by
from refitd.policy.contest import forgiven
from refitd.policy.next_action import Agenda, at_rest, until_look, until_retry
from refitd.policy.observe import after_word, agreed, believed, judged, proved, standing
from refitd.state.journal.journal import JournalError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.states import EngineState, VersionState


class RemovedError(Exception):
    """The engine was removed."""


class EngineEntry:
    """The entry of the engine that is named `engine_id` now. A later engine of that name has an entry of its own."""

    def __init__(self, engine_id: str, store: Store, targets: Targets, interval: float, chance: random.Random) -> None:
        self.id, self.store, self.targets = engine_id, store, targets
        self.agenda = Agenda()
        self._is_there = False  # whether it was counted as behind what it serves
        self._rests = False  # whether it was at rest when it was settled when it is looked at
        self._url = store.engines[engine_id].url
        self._interval = interval  # that the operator wants between two looks
        self._chance = chance

    @property
    def record(self) -> EngineRecord:
        """The engine as it is now.

        Raises:
            RemovedError: it was removed, as may happen at any await.
        """
        if not self.is_named:
            raise RemovedError
        return self.store.engines[self.id]

    @property
    def is_named(self) -> bool:
        record = self.store.engines.get(self.id)
        return record is not None and record.url == self._url

    def unless_removed(self, after: EngineRecord) -> None:
        """End here if the engine was removed during its load, and leave the store what that load has left behind.

        Raises:
            RemovedError: it was removed.
        """
        if not self.is_named:
            self.store.leave(after)
            raise RemovedError

    @property
    def now(self) -> float:
        return self.store.clock.monotonic()

    def later(self, times: int) -> float:
        return self.now + until_retry(times, self._chance)

    def until_look(self, *, arrives: bool = False) -> float:
        """Seconds until it is looked at again, as it is now. `arrives`: it comes to rest, or leaves it, only now."""
        rests = self._is_at_rest
        alike = len(self.store.engines) if rests else self.targets.restless()
        return until_look(self._interval, alike, self._chance, rests=rests, arrives=arrives)

    @property
    def _is_at_rest(self) -> bool:
        return at_rest(self.record, self.target_id)

    def look_again(self, *, most: float = math.inf, anew: bool = False) -> None:
        """Settle when it is looked at again: in `most` seconds at most. `anew`: other engines may have come to rest at
        the same time.
        """
        rests = self._is_at_rest
        wait = self.until_look(arrives=anew or rests is not self._rests)
        self.agenda = replace(self.agenda, probe_at=self.now + min(wait, most))
        self._rests = rests

    def hasten(self) -> bool:
        """Have an engine that has left rest looked at as soon as others that are not at rest. It is behind from now on.
        Return whether it was settled anew when it is looked at.
        """
        if not self._rests or self._is_at_rest:
            return False
        self.look_again(most=max(0.0, self.agenda.probe_at - self.now))
        if (record := self.record).state is EngineState.IN_SYNC:
            self.put(record, standing(record, self.target_id))
        return True

    @property
    def target_id(self) -> str | None:
        target = self.targets.target_of(self.record.run)
        return None if target is None else target.id

    def fingerprint_of(self, version: str) -> str | None:
        """The fingerprint that a load of a version is held against here: that of clean loads on this configuration.
        None where none is recorded, or one other engine alone has given it.
        """
        record = self.record
        recorded = self.store.fingerprint(version, record.seen.configuration or "")
        given = self.store.engines.given(version, record.seen.configuration, recorded or "")
        return believed(recorded, given, self.id)

    def is_on_record(self, version: str) -> bool:
        return self.store.fingerprint(version, self.record.seen.configuration or "") is not None

    def own_fingerprint_of(self, version: str) -> str | None:
        """The fingerprint that this engine gave for a version; where it gave none, that of others if it is believed."""
        return self.record.contents.given.get(version) or self.fingerprint_of(version)

    def arrive(self) -> None:
        """Probe at once where a rollback has made what the engine serves the target again."""
        record = self.record.to_load
        is_there = (
            record.state is EngineState.BEHIND and record.serving is not None and record.serving == self.target_id
        )
        if is_there and not self._is_there:  # once: a probe without an answer is repeated at the usual interval
            self.agenda = replace(self.agenda, probe_at=self.now)
        self._is_there = is_there

    def resync(self) -> None:
        """Have the engine loaded again whatever it serves.

        What it serves until then stays known: an engine that is away is asked for nothing, and nothing is forgotten.
        """
        self.agenda = Agenda(ahead=self.agenda.ahead)
        record = forgiven(self.record.having(failures=0, taints=0, strikes={}))
        record = record.having(reload=record.known)  # one with unknown contents is loaded in any case
        if record.state is EngineState.QUARANTINED:
            record = replace(record, state=EngineState.TAINTED)
        elif record.known and not record.state.is_away and record.trouble.taken is None:
            record = record.having(state=EngineState.BEHIND, reason="a resync was asked for")
        when = " when it is reachable" if record.state is EngineState.UNREACHABLE else ""
        self.store.put_engine(record, f"resync was asked for: it will be loaded again{when}")

    def put(self, before: EngineRecord, after: EngineRecord) -> None:
        """Put the engine's new record into the store, and log what has changed.

        Raises:
            RemovedError: the engine was removed.
        """
        if not self.is_named:
            raise RemovedError
        if before.how_it_loads != after.how_it_loads:
            self.store.say("engine", self.id, after.how_it_loads, of_run=after.run, state=after.state.value)
        changed = (before.state, before.serving, before.reason) != (after.state, after.serving, after.reason)
        self.store.put_engine(after, log_line(after) if changed else None)

    def proved(self, after: EngineRecord, found: str | None) -> EngineRecord:
        """The record after a load that went well, with what its fingerprint proves. What most engines give is recorded.
        `found`: the fingerprint of what the load left behind; None where the server does not tell.
        """
        if found is None or after.seen.configuration is None or after.serving is None:
            return after
        version, recorded = after.serving, self.store.fingerprint(after.serving, after.seen.configuration)
        if agree(found, found) is None:  # equal on no two engines: nobody is a witness for another
            if recorded is None:
                self.store.record_fingerprint(version, after.seen.configuration, found)
            return proved(after, found, recorded)
        again = version in after.contents.given
        after = self._giving(after, version, found)
        given = self._heard(after, version, found)
        after = proved(after, found, recorded, given, again=again)
        self.agrees(after, found if recorded is not None else None)
        return after

    def gave_other(self, after: EngineRecord, version: str, found: str | None) -> EngineRecord:
        """The record after a load that its fingerprint alone has refuted. This engine gives that from now on, unless a
        clean load has given another. `found`: the fingerprint that the load gave; None where that was not the reason.
        """
        if found is None or agree(found, found) is None or version in after.contents.given:
            return after
        after = self._giving(after, version, found)
        was = self.store.fingerprint(version, after.seen.configuration or "")
        return judged(after, version, self._heard(after, version, found), was=was)

    def _giving(self, after: EngineRecord, version: str, found: str) -> EngineRecord:
        """The record of an engine that is a witness of one more version. Those that are collected need none."""
        versions = self.store.versions
        good = {id_ for id_ in after.contents.given if id_ in versions and versions[id_].state is VersionState.SEALED}
        return after.having(
            given={id_: after.contents.given[id_] for id_ in after.contents.given if id_ in good} | {version: found}
        )

    def _heard(self, after: EngineRecord, version: str, found: str) -> Mapping[str, str]:
        """What engines have given for a version, this one too; the others are judged by that, and what is on record."""
        store, configuration = self.store, after.seen.configuration or ""
        given = {**store.engines.given(version, configuration, found), self.id: found}
        recorded = store.fingerprint(version, configuration)
        right = agreed(given.values())
        is_alike = means_of(recorded or found) == means_of(found)
        if is_alike and (right is not None or recorded not in given.values()):
            store.record_fingerprint(version, configuration, right or found)
        if len(set(given.values())) > 1 or store.engines.contradicted(version):
            for name in given.keys() - {self.id}:
                other = store.engines[name]
                if (now := judged(other, version, given, was=recorded)) != other:
                    store.put_engine(now, log_line(now))
            self.targets.changed.notify()
        return given

    def agrees(self, engine: EngineRecord, found: str | None) -> None:
        """Where an engine agrees with the first load of its version, the engine that gave that agrees with it.
        `found`: the fingerprint of its contents; None where they were compared with none.
        """
        first = None if found is None else proof_by(found, recorded=True)
        if (
            found is None
            or first == proof_by(found)
            or engine.contents.proof != proof_by(found)
            or agree(found, found) is None
        ):
            return
        for other in self.store.engines.proved(engine.serving, engine.seen.configuration, first):
            if other.known and other.id != self.id and other.run == engine.run:
                self.store.put_engine(other.having(proof=engine.contents.proof))

    def hears(self, host: HostEngines) -> None:
        """A host that carries out an order has said how its engines are, and what it does for them."""
        if self.is_named:
            self.store.put_engine(after_word(self.record, host))

    async def written(self) -> str | None:
        """Wait until what was put is durable; return why it is not, None where it is."""
        try:
            await self.store.durable()
        except JournalError as error:
            return str(error)
        return None


def log_line(engine: EngineRecord) -> str:
    contents = engine.of_others or "start-up weights" if engine.known else "unknown contents"
    why = f" ({engine.reason})" if engine.reason else ""
    return f"{engine.state}: {engine.serves(engine.serving or contents)}{why}"
