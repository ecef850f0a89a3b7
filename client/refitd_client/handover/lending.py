"""A version that is lent to engines while its bytes are staged into its files, and what is owed where these fail.

Engines may hear of the version as soon as it is lent: its name is used up from then on, and where its files do not come
about the service is told, and the next version is durable before any engine hears of it.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from refitd_client.content import Content
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.fingerprint import to_texts
from refitd_client.handover.handing import Hand, Handed, NotOfferedError, Place
from refitd_client.handover.making import Layouts
from refitd_client.shards import TensorShards

_log = logging.getLogger("refitd_client")


@dataclass(slots=True)
class Debt:
    """Whether the files of something that was handed over are `due`, and were not written."""

    due: bool = False


@dataclass(frozen=True, slots=True)
class Lent:
    """What is to be staged meanwhile, and what waits for the engines, or says why nothing is lent."""

    content: Content
    over: Callable[[], Handed]


@dataclass(slots=True, kw_only=True)
class Lending:
    """One version's. `layouts` and `debt` are the publisher's."""

    place: Place
    layouts: Layouts
    debt: Debt
    _told: bool = field(default=False, init=False)

    @contextmanager
    def of(self, content: Content) -> Generator[Lent, None, None]:
        """Lend the tensors while the context lasts.

        Raises:
            InvalidWeightsError: a tensor is not finite.
        """
        hand = _hand(self.place, content, self.layouts)
        if isinstance(hand, str):
            handed = Handed(reason=hand)
            _log.warning("%s is not handed over, and goes by its files: %s", self.place.version, hand)
            yield Lent(content, lambda: handed)
            return
        self._told = True
        try:
            yield Lent(_looked_at(content, hand.fingerprints), hand.over)
        finally:
            hand.withdraw()

    def failed(self, error: BaseException) -> None:
        """The files will not come: where the service was told of an offer, engines may serve what has none now."""
        if self._told:
            self.debt.due = True
            self.place.fail(str(error) or type(error).__name__)


def _looked_at(content: Content, fingerprints: dict[str, int]) -> Content:
    """The tensors were looked at for the offer, and stay as they are while they are lent. A second look would take the
    GPU from the engine that copies them.
    """
    if not isinstance(content.weights, TensorShards):
        return content
    weights = replace(content.weights, check_finite=False, fingerprinted=False)
    claims = replace(content.claims, fingerprints=fitting_fingerprints(to_texts(fingerprints)))
    return replace(content, weights=weights, claims=claims)


def _hand(place: Place, content: Content, layouts: Layouts) -> Hand | str:
    """The offer of them, or why there is none."""
    weights = content.weights
    if not isinstance(weights, TensorShards):
        return "files are not lent: pass tensors"
    try:
        return Hand(place, weights.sources, layouts, check_finite=weights.check_finite)
    except NotOfferedError as error:
        return str(error)
