"""What is known of runs beside their versions: which have ended, and since when engines follow them. Pure.

A run that has ended is closed, by whoever knows: an operator, or the trainer. Nothing is wrong with it because no
engine follows it; engines that still follow it are free for a new run; of its versions collection keeps the newest
good one, and one without a verdict that is newer. The next version that comes opens it again.
"""

from collections.abc import Iterable

from refitd.state.records import EngineRecord, RunRecord


class Runs:
    """`closed` has when somebody said that a run has ended (time of day, for people), `followed_since` since when
    engines follow one (monotonic seconds). A run that is in neither is open, and no engine follows it.
    """

    def __init__(self) -> None:
        self.closed: dict[str, str] = {}
        self.followed_since: dict[str, float] = {}

    def remember(self, record: RunRecord) -> None:
        """Take what the journal knows."""
        if record.closed_at is not None:
            self.closed[record.run] = record.closed_at

    def record_of(self, run: str) -> RunRecord:
        """What the journal is to know."""
        return RunRecord(run=run, closed_at=self.closed.get(run))

    def count(self, engines: Iterable[EngineRecord], now: float) -> None:
        """Take which runs engines follow now."""
        runs = {engine.run for engine in engines if engine.run is not None}
        kept = {run: self.followed_since.get(run, now) for run in runs}
        self.followed_since.clear()
        self.followed_since.update(kept)
