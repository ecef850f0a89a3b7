"""A version that is exported to engines before its bytes are staged into its files, and what is owed where these fail.

Engines may hear of the version as soon as it is exported: its name is used up from then on. Where its files do not come
about the service is told, and the next version is durable before any engine hears of it.
"""

import logging
from dataclasses import dataclass, field, replace

from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.fingerprint import to_texts
from refitd_client.transport.ipc.handing import Hand, Handed, NotOfferedError, Place
from refitd_client.transport.ipc.making import Layouts
from refitd_client.write.content import Content
from refitd_client.write.shards import TensorShards

_log = logging.getLogger("refitd_client")


@dataclass(slots=True)
class Debt:
    """Whether the files of something that was handed over are `due`, and were not written."""

    due: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of an offer, and what is to be staged."""

    content: Content
    handed: Handed


@dataclass(slots=True, kw_only=True)
class TensorExport:
    """One version's. `layouts` and `debt` are the publisher's."""

    place: Place
    layouts: Layouts
    debt: Debt
    _told: bool = field(default=False, init=False)

    def of(self, content: Content) -> Answered:
        """Export the tensors until engines have answered. Where nothing is exported, it is said why.

        Raises:
            InvalidWeightsError: a tensor is not finite.
        """
        hand = _hand(self.place, content, self.layouts)
        if isinstance(hand, str):
            _log.warning("%s is not handed over, and goes by its files: %s", self.place.version, hand)
            return Answered(_fingerprinted(content), Handed(reason=hand))
        self._told = True
        try:
            return Answered(_looked_at(content, hand.fingerprints), hand.over())
        finally:
            hand.withdraw()

    def failed(self, error: BaseException) -> None:
        """The files will not come: where the service was told of an offer, engines may serve what has none now."""
        if self._told:
            self.debt.due = True
            self.place.fail(str(error) or type(error).__name__)


def _fingerprinted(content: Content) -> Content:
    """An offer names the fingerprints of tensors, and so does the manifest of what was to be one."""
    if not isinstance(content.weights, TensorShards):
        return content
    return replace(content, weights=replace(content.weights, fingerprinted=True))


def _looked_at(content: Content, fingerprints: dict[str, int]) -> Content:
    """The tensors were looked at for the offer, and are what they were: one look is enough."""
    if not isinstance(content.weights, TensorShards):
        return content
    weights = replace(content.weights, check_finite=False, fingerprinted=False)
    claims = replace(content.claims, fingerprints=fitting_fingerprints(to_texts(fingerprints)))
    return replace(content, weights=weights, claims=claims)


def _hand(place: Place, content: Content, layouts: Layouts) -> Hand | str:
    """The offer of them, or why there is none."""
    weights = content.weights
    if not isinstance(weights, TensorShards):
        return "files are not exported: pass tensors"
    try:
        return Hand(place, weights.sources, layouts, check_finite=weights.check_finite)
    except NotOfferedError as error:
        return str(error)
