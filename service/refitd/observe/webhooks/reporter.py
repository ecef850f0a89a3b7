"""Listens to the store for what is news. What happened is told once, also when it happens again and again."""

from collections.abc import Callable, Collection

from refitd.observe.unserved import Unserved
from refitd.observe.webhooks.news import News, Topic, of_degraded, of_stalled, of_version
from refitd.rollout.targets import Targets
from refitd.state.observer import SilentObserver
from refitd.state.records import RolloutRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.states import RolloutState, VersionState

Tell = Callable[[News], None]


class Reporter(SilentObserver):
    """Tells the news of the topics that are wanted."""

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
        """Begin with what the journal knows: what was told before is told no second time."""
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
            self._report(of_degraded(version, self._store.engines_of(rollout.run)))

    def look(self) -> None:
        """Whether a run has been on its way for too long: to be asked from time to time."""
        on_their_way = self._unserved.runs
        self._stalled &= set(on_their_way)
        for run in on_their_way:
            seconds = self._unserved.seconds(run)
            if seconds >= self._stalled_after and run not in self._stalled:
                self._stalled.add(run)
                target = self._targets.of_run(run).target
                self._report(of_stalled(run, seconds, target, self._store.engines_of(run)))
