"""A version in a trainer's memory on this host, on its way into a model: by the load plan, like one on disk.

Of an offer only its file is read before the pause. In the pause it is held while the tensors are copied: the trainer
waits for that. What was copied counts if the trainer lives and stands by it then, and the fingerprints are the offer's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from refitd.catalog.inventory import Reference
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder
from refitd_client.handover.device import uuid_of
from refitd_client.handover.lent import Borrowed
from refitd_client.handover.offer import OfferRefusedError
from refitd_sglang.contents import differing, equal
from refitd_sglang.feeding import Feed
from refitd_sglang.keeper import Keeper
from refitd_sglang.lent import Memory, memory_of
from refitd_sglang.road import table_of
from refitd_sglang.source import Place, SourceRefusedError
from refitd_sglang.standing import Standing

if TYPE_CHECKING:
    from refitd_sglang.call import Call
    from refitd_sglang.loading import Loading, Readied
    from refitd_sglang.plan import Plan

_UNLEARNED = (
    "it has not been seen yet how this model is loaded: from a GPU's memory it is taken after a load from files"
)
_ELSEWHERE = "it is on another GPU, and the model's loader computes with some of it: that needs files"


@dataclass(slots=True, eq=False, kw_only=True)
class Offered:
    """As `Way`."""

    source: Memory
    loading: "Loading"
    borrowed: Borrowed
    device: torch.device | None = None
    readied: "Readied | None" = None
    proved: int = 0
    _fits: bool = False  # in this pause: the plan of what was made ready
    _others: list[int] | None = None
    _prints: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    kind = "handover"

    @property
    def label(self) -> str:
        """As `Way`."""
        return self.source.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return self.source.digest

    @property
    def signature(self) -> str:
        """As `Way`."""
        return self.source.digest

    @property
    def nbytes(self) -> int:
        """As `Way`."""
        return self.source.nbytes

    @property
    def folder(self) -> Path:
        """Where its files will be."""
        return self.source.place.folder

    def is_unchanged(self) -> bool:
        """As `Way`: whether it is still offered."""
        return self.borrowed.is_lent

    @property
    def watches(self) -> bool:
        """As `Way`."""
        ready = self.readied
        self._fits = ready is not None and self.loading.has(ready.plan)
        return self._fits and ready is not None and ready.road.watch is not None

    def make_ready(self) -> None:
        """Do all that can be done before the pause: nothing, where it was done for the same places and plan.

        Raises:
            SourceRefusedError: it cannot be taken from there.
        """
        opened, plan = self.source.opened, self.loading.plan
        if opened.readied is None or opened.readied.plan is not plan:
            self._plan_for(plan)
            opened.readied = self.loading.make_ready(self.source)
        self.readied = opened.readied

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: "Call") -> tuple[Feed, str | None]:
        """As `Way`. From here to the end of `check` the trainer waits."""
        loaded = False
        try:
            with self.source.keeper.holding(self.source.opened):
                self.borrowed.hold()
                feed, fault = self.loading.load(call, self._given(), partial=False, readied=self.readied)
        except (OfferRefusedError, SourceRefusedError) as error:
            return Feed({}), str(error)
        else:
            self._others, loaded = feed.others, fault is None
            return feed, fault
        finally:
            if not loaded:
                self._over()

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`: all that is only copied has the fingerprints of the offer, and the trainer still stands by it."""
        try:
            if not self.borrowed.is_lent:
                return "the trainer is gone, or took its tensors back while they were copied"
            expected = self.source.offer.expected
            self._prints = self.loading.prints(self.source, contents, self._others)
            self.proved = equal(self._prints, expected)
            fault = differing(self._prints, expected)
            if fault is not None:
                self.source.keeper.close()  # what was opened may not be what the trainer has there now
            return None if fault is None else fault.replace("refit.json says", "the offer says")
        finally:
            self._over()

    def put_back(self, call: "Call", previous: Standing | None, path: str) -> tuple[Feed, str | None]:
        """As `Way`: through the loader, since the plan may be at fault."""
        if previous is None:
            return Feed({}), "what was served before cannot be read any more"
        return self.loading.put_back(call, previous.tensors(), path)

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`. Its files are not there yet: see `with_files`."""
        return Standing(source=self.source, contents=contents, prints=self._prints)

    def _given(self) -> Memory:
        """What the load works with."""
        if not self.source.opened.is_on_device:
            return self.source  # mapped so that nothing is written to it
        plan = self.loading.plan if self._fits else self._plan_for(self.loading.plan)
        return replace(self.source, loaded=frozenset(() if plan is None else plan.residual))

    def _plan_for(self, plan: "Plan | None") -> "Plan | None":
        """The plan, where the trainer's memory can be read along it. Host memory can, also without one.

        Raises:
            SourceRefusedError: it cannot.
        """
        opened = self.source.opened
        if not opened.is_on_device:
            return plan
        if plan is None or not plan.replays or not plan.proven or not self.loading.has(plan):
            raise SourceRefusedError(_UNLEARNED)
        if any(place.device != uuid_of(self.device) for place in opened.places.values()) and (
            plan.residual or table_of(plan.copies, self.source.structure.headers).rest
        ):
            raise SourceRefusedError(_ELSEWHERE)
        return plan

    def _over(self) -> None:
        self.borrowed.let_go()
        self.borrowed.close()


def open_offer(
    place: Place,
    offer: str,
    reference: Callable[[], Reference],
    loading: "Loading",
    keeper: Keeper,
    device: torch.device | None,
) -> Offered:
    """Look at an offer of the version that will be at `place`; `offer` is its file's path beneath the root. The model
    is on `device`, where it is on a GPU.

    Raises:
        SourceRefusedError: it is not one to load into the model that `reference` describes.
        OSError: it cannot be read.
    """
    borrowed, opened = keeper.borrow(place.root, offer)
    source = memory_of(place, borrowed.offer, opened, keeper, reference, on_device=device is not None)
    return Offered(source=source, loading=loading, borrowed=borrowed, device=device)


def is_promised(path: str) -> bool:
    """Whether a version's files may yet come here: a root's folder of that name, and nothing there."""
    folder = Path(path)
    return (
        parse_version_folder(folder.name) is not None
        and not folder.exists()
        and any((above / SERVICE_FOLDER).is_dir() for above in folder.absolute().parents)
    )
