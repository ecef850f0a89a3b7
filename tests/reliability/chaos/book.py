"""What was published: which model stands behind which version, and behind which label. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.models import START_UP
from refitd_client.contract.naming import Order, version_folder, version_id, version_label

RUN = "exp/trial"
START_UP_LABEL = "default"


@dataclass(frozen=True, slots=True, order=True)
class Published:
    """A version and the model that it holds. Versions compare by (generation, step)."""

    order: Order
    model: str = field(compare=False)

    @property
    def id(self) -> str:
        """Its id on the wire."""
        return version_id(RUN, self.order)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return version_folder(self.order)

    @property
    def label(self) -> str:
        """What engines call it."""
        return version_label(self.order)


AT_START = Published(Order(0, 0), START_UP)


@dataclass(slots=True)
class Book:
    """All versions that got their name, whether or not the publisher lived to say so."""

    versions: set[Published] = field(default_factory=set[Published])

    def add(self, version: Published) -> None:
        """Write one down."""
        self.versions.add(version)

    @property
    def newest(self) -> Published:
        """What engines are to serve in the end."""
        return max(self.versions, default=AT_START)

    def labelled(self, label: str) -> Sequence[Published]:
        """What an answer with this label may come from, newest first."""
        if label == START_UP_LABEL:
            return [AT_START]
        return sorted((version for version in self.versions if version.label == label), reverse=True)
