"""Decides what is news, and writes the messages. What happened is told once, also when it happens again and again.

    {"type": "version.rejected", "timestamp": "2026-11-21T12:00:00.000Z",
     "data": {"run": "grpo", "version": "grpo~v000123", "step": 123, "reason": "…", …}}

The shape is that of Standard Webhooks (https://www.standardwebhooks.com); docs/webhooks.md lists what is under `data`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from refitd.observe.telemetry import Unserved
from refitd.observe.webhooks.rules import Topic
from refitd.rollout.targets import Targets
from refitd.state.observer import Observer
from refitd.state.records import EngineRecord, RolloutRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, RolloutState, VersionState

NAMED_ENGINES = 50  # of those that are late, so that a large fleet makes no large message

_BAD = frozenset({VersionState.REJECTED, VersionState.LOST})


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened."""

    topic: Topic
    data: dict[str, Any]

    def body(self, at: str) -> str:
        """The message. `at` is when it happened, RFC 3339."""
        document = {"type": self.topic.message_type, "timestamp": at, "data": self.data}
        return msgspec.json.encode(document).decode()


def of_version(before: VersionRecord | None, after: VersionRecord) -> News | None:
    """Return the news in a change of a version, None where there is none."""
    if after.served_at is not None and before is not None and before.served_at is None:
        return News(Topic.SERVED, _version(after) | {"served_at": after.served_at})
    if after.state in _BAD and (before is None or before.state is not after.state):
        reason = {"state": after.state.value, "code": after.code, "reason": after.reason}
        return News(Topic.REJECTED, _version(after) | reason)
    return None


def of_stalled(run: str, seconds: float, target: VersionRecord | None, engines: Sequence[EngineRecord]) -> News:
    """Return the news that the engines of a run have not arrived for a while.

    Args:
        run: the run.
        seconds: for how long.
        target: what they should serve.
        engines: those that follow the run.
    """
    wanted = {"run": run} if target is None else _version(target)
    return News(
        Topic.STALLED, wanted | {"seconds": round(seconds)} | _late("" if target is None else target.id, engines)
    )


def _version(version: VersionRecord) -> dict[str, Any]:
    return {
        "run": version.run,
        "version": version.id,
        "generation": version.order.generation,
        "step": version.order.step,
        "kind": version.kind.value,
    }


def _late(version: str, engines: Sequence[EngineRecord]) -> dict[str, Any]:
    late = [each for each in engines if each.serving != version or each.state is EngineState.UNREACHABLE]
    named = [{"id": each.id, "state": each.state.value, "reason": each.reason} for each in late[:NAMED_ENGINES]]
    return {"engines": len(engines), "late": len(late), "late_engines": named}


Tell = Callable[[News], None]


class Reporter(Observer):
    """Listens to the store and tells the news of the topics that are wanted."""

    def __init__(
        self,
        store: Store,
        targets: Targets,
        unserved: Unserved,
        tell: Tell,
        *,
        topics: Collection[Topic],
        stalled_after: float,
    ) -> None:
        """Begin with what the journal knows, so that nothing is told a second time."""
        self._store = store
        self._targets = targets
        self._unserved = unserved
        self._tell = tell
        self._topics = frozenset(topics)
        self._stalled_after = stalled_after
        self._stalled: set[str] = set()
        self._bad: dict[str, str | None] = {}
        degraded = [each for each in store.rollouts.values() if each.state is RolloutState.DEGRADED]
        self._degraded = {rollout.run: rollout.number for rollout in degraded}

    def _report(self, news: News | None) -> None:
        if news is not None and news.topic in self._topics:
            self._tell(news)

    def version_changed(self, before: VersionRecord | None, after: VersionRecord) -> None:
        """See `Observer`. A version that is looked at again, as when its notice comes late, may be bad as before."""
        news = of_version(before, after)
        if news is not None and news.topic is Topic.REJECTED:
            if after.id in self._bad and self._bad[after.id] == after.reason:
                return
            self._bad[after.id] = after.reason
        if after.state is VersionState.DELETED:
            self._bad.pop(after.id, None)
        self._report(news)

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """See `Observer`. A rollout is degraded once, however often an engine comes back and goes away again."""
        version = self._store.versions.get(rollout.version)
        if rollout.state is not RolloutState.DEGRADED or version is None:
            return
        if self._degraded.get(rollout.run) != rollout.number:
            self._degraded[rollout.run] = rollout.number
            late = _late(version.id, self._store.engines_of(rollout.run))
            self._report(News(Topic.DEGRADED, _version(version) | late))

    def look(self) -> None:
        """Find runs whose engines have not arrived for too long; called from time to time."""
        on_their_way = self._unserved.runs
        self._stalled &= set(on_their_way)
        for run in on_their_way:
            seconds = self._unserved.seconds(run)
            if seconds >= self._stalled_after and run not in self._stalled:
                self._stalled.add(run)
                target = self._targets.of_run(run).target
                self._report(of_stalled(run, seconds, target, self._store.engines_of(run)))
