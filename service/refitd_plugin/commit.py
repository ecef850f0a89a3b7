"""One rank's writing of a version that fits, and its way back: each ends in a report, whatever happens."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from refitd_plugin.contents import contents_of
from refitd_plugin.plan import Anatomy, anatomy
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.stages import Stages
from refitd_plugin.tensor_feed import TensorFeed
from refitd_plugin.transaction import RankReport, RankState
from refitd_plugin.update_source import UpdateSource

logger = logging.getLogger("refitd_plugin")


@dataclass(slots=True, kw_only=True)
class Commit:
    """One update on one rank. `model_path` and `before` are what the engine named and the model held before it (None
    where the update source watches that itself); `after` is what the model holds then. `previous` opens what is served
    now, so that it can be put back.
    """

    call: UpdateCall
    update_source: UpdateSource
    rank: int
    model: torch.nn.Module
    model_path: str
    before: dict[str, str] | None
    previous: Callable[[str], ServedState | None]
    stages: Stages
    how: str = ""
    after: dict[str, str] = field(default_factory=dict[str, str])
    _served: ServedState | None = None
    _places: Anatomy | None = None
    _written: TensorFeed | None = None

    def write(self) -> RankReport:
        """Load. No rank waits for this one in vain."""
        began = False
        try:
            self._served = self.previous(self.model_path)  # before anything is written
            self._places = anatomy(self.model)
            began = True
            return self._loaded()
        except Exception as error:
            logger.warning("refitd could not carry out a load", exc_info=True)
            return self._report(RankState.FAILED if began else RankState.UNTOUCHED, f"{type(error).__name__}: {error}")

    def restore(self, mine: RankReport) -> RankReport:
        """Put back what was there, and hold it against the fingerprints of before. `mine` is what `write` reported."""
        if mine.state is RankState.UNTOUCHED:
            return mine
        try:
            return self._put_back()
        except Exception as error:
            logger.warning("refitd could not put back what was there", exc_info=True)
            return self._report(RankState.LOST, f"{type(error).__name__}: {error}")

    def _loaded(self) -> RankReport:
        with self.stages.during("write"):
            feed, fault = self.update_source.write(self.call)
        self.how, self._written = feed.how, feed
        self.before = feed.before if self.before is None else self.before
        if fault is not None:
            return self._unwritten(feed, fault)
        with self.stages.during("after"):
            self.after = contents_of(self.model) if feed.after is None else feed.after
            fault = self.update_source.check(self.after)
        return self._report(RankState.WRITTEN) if fault is None else self._report(RankState.FAILED, fault)

    def _unwritten(self, feed: TensorFeed, fault: str) -> RankReport:
        same = self.before is None or contents_of(self.model) == self.before
        untouched = not feed.begun and same and self._in_place
        return self._report(RankState.UNTOUCHED if untouched else RankState.FAILED, fault)

    def _put_back(self) -> RankReport:
        feed, fault = self.update_source.put_back(self.call, self._served, self.model_path)
        if contents_of(self.model) != self._known:
            return self._lost(fault or "its fingerprints are not those of before")
        if fault is None:
            return self._report(RankState.RESTORED)
        if not self._shows_all(feed):
            return self._lost(fault)
        return self._report(RankState.RESTORED, f"so did the way back ({fault}), but every weight is what it was")

    @property
    def _known(self) -> dict[str, str] | None:
        """The fingerprints of before, or those that what is served was found to have, where nobody came to look."""
        if self.before is not None or self._served is None:
            return self.before
        return self._served.contents or None

    def _shows_all(self, feed: TensorFeed) -> bool:
        """Whether the fingerprints say everything, though the way back broke off.

        After the last tensor SGLang repacks weights and models compute some more, also into what is neither parameter
        nor buffer: no fingerprint shows whether that is half done. What reads weights by their addresses (a captured
        graph) needs them in their places.
        """
        return self._written is not None and not self._written.done and not feed.done and self._in_place

    @property
    def _in_place(self) -> bool:
        return anatomy(self.model) == self._places

    def _lost(self, fault: str) -> RankReport:
        return self._report(RankState.LOST, f"{self.model_path} could not be put back: {fault}")

    def _report(self, state: RankState, reason: str = "") -> RankReport:
        return RankReport(rank=self.rank, state=state, reason=reason[:1000])
