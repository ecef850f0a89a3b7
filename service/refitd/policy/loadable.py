"""Which deltas engines can be brought to now: those that a copy holds. Full versions they load as they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from refitd.state.version import VersionRecord
from refitd_client.contract.states import Kind


@dataclass(frozen=True, slots=True)
class Carriage:
    """`carried` maps the ids of deltas to the paths of copies that hold them, `refused` to the reason why none can.

    A delta that neither names is being written into a copy, or waits for one.
    """

    carried: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def can_load(self, version: VersionRecord) -> bool:
        """Whether engines find its files somewhere."""
        return version.kind is not Kind.DELTA or version.id in self.carried

    def is_refused(self, version: VersionRecord) -> bool:
        """Whether it cannot be carried out: engines stay on what they have until something else comes."""
        return version.id in self.refused

    def path_of(self, version: VersionRecord) -> str | None:
        """Where engines find its files, None where they find none now."""
        return version.path if version.kind is not Kind.DELTA else self.carried.get(version.id)


NOTHING = Carriage()
