"""For how long the engines of a run have not been where they should be.

The newest rollout's age would not do: where a trainer is faster than its engines, each rollout is superseded before it
is old, and nothing is ever served. So the clock runs from the first rollout after the last one that was through.
"""

from collections.abc import Iterable, Mapping

from refitd.clock import Clock
from refitd.state.observer import SilentObserver
from refitd.state.records import RolloutRecord
from refitd_client.contract.states import RolloutState

_THROUGH = frozenset({RolloutState.COMPLETE, RolloutState.DEGRADED})


class Unserved(SilentObserver):
    """A clock for each run that is on its way. Paused rollouts wait for an operator, and for nobody else. A run that no
    engine follows is not on its way; what was published meanwhile counts from when one does (`followed_since`).
    """

    def __init__(
        self, clock: Clock, followed_since: Mapping[str, float], rollouts: Iterable[RolloutRecord] = ()
    ) -> None:
        """Begin with what the journal knows: what was on its way at the last stop counts from now."""
        self._clock = clock
        self._followed_since = followed_since
        self._since: dict[str, float] = {}
        for rollout in rollouts:
            self.rollout_changed(rollout)

    def rollout_changed(self, rollout: RolloutRecord) -> None:
        """See `Observer`."""
        if rollout.state in _THROUGH or rollout.paused_since is not None:
            self._since.pop(rollout.run, None)
        else:
            self._since.setdefault(rollout.run, self._clock.monotonic())

    def seconds(self, run: str) -> float:
        """Seconds for which a run's engines are on their way; 0 where they have arrived, or are paused."""
        if run not in self.runs:
            return 0.0
        return self._clock.monotonic() - max(self._since[run], self._followed_since[run])

    @property
    def runs(self) -> list[str]:
        """The runs that are on their way."""
        return [run for run in self._since if run in self._followed_since]
