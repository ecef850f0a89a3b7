"""One rank's writing of a version that fits, and its way back: each ends in a report, whatever happens."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from refitd_sglang.call import Call
from refitd_sglang.contents import contents_of
from refitd_sglang.feeding import Feed
from refitd_sglang.stages import Stages
from refitd_sglang.standing import Standing
from refitd_sglang.transaction import Report, State
from refitd_sglang.way import Way

logger = logging.getLogger("refitd_sglang")


@dataclass(slots=True, kw_only=True)
class Commit:
    """One update on one rank. `model_path` and `before` are what SGLang named and the model held before it (None where
    the way watches that itself); `after` is what the model holds then. `previous` opens what is served now, so that it
    can be put back.
    """

    call: Call
    way: Way
    rank: int
    model: torch.nn.Module
    model_path: str
    before: dict[str, str] | None
    previous: Callable[[str], Standing | None]
    stages: Stages
    how: str = ""
    after: dict[str, str] = field(default_factory=dict[str, str])
    _served: Standing | None = None

    def write(self) -> Report:
        """Load. No rank waits for this one in vain."""
        began = False
        try:
            self._served = self.previous(self.model_path)  # before anything is written
            began = True
            return self._loaded()
        except Exception as error:
            logger.warning("refitd could not carry out a load", exc_info=True)
            return self._report(State.FAILED if began else State.UNTOUCHED, f"{type(error).__name__}: {error}")

    def restore(self, mine: Report) -> Report:
        """Put back what was there, and hold it against the fingerprints of before. `mine` is what `write` reported."""
        if mine.state is State.UNTOUCHED:
            return mine
        try:
            return self._put_back()
        except Exception as error:
            logger.warning("refitd could not put back what was there", exc_info=True)
            return self._report(State.LOST, f"{type(error).__name__}: {error}")

    def _loaded(self) -> Report:
        with self.stages.during("write"):
            feed, fault = self.way.write(self.call)
        self.how, self.before = feed.how, feed.before if self.before is None else self.before
        if fault is not None:
            return self._unwritten(feed, fault)
        with self.stages.during("after"):
            self.after = contents_of(self.model) if feed.after is None else feed.after
            fault = self.way.check(self.after)
        return self._report(State.WRITTEN) if fault is None else self._report(State.FAILED, fault)

    def _unwritten(self, feed: Feed, fault: str) -> Report:
        same = not feed.begun and (self.before is None or contents_of(self.model) == self.before)
        return self._report(State.UNTOUCHED if same else State.FAILED, fault)

    def _put_back(self) -> Report:
        fault = self.way.put_back(self.call, self._served, self.model_path)
        if fault is None and contents_of(self.model) != self.before:
            fault = "its fingerprints are not those of before"
        if fault is not None:
            return self._report(State.LOST, f"{self.model_path} could not be put back: {fault}")
        return self._report(State.RESTORED)

    def _report(self, state: State, reason: str = "") -> Report:
        return Report(rank=self.rank, state=state, reason=reason[:1000])
