"""A trainer's tensors in memory, lent as a version: whose they are, and whether anyone reads them now. Where a process
group brings them to the engines' hosts, how that goes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Sending(StrEnum):
    """What a trainer's sender does."""

    WHOLE = "it sends all bytes, as they are"
    SILENT = "it never joins, or joins and is silent"
    OTHER = "it sends other bytes, or too few"
    BREAKS = "it ends in the middle"


@dataclass(slots=True, eq=False)
class SimOffer:
    """An offer of `version`, whose files will be at `path`. `name` is the file of the offer, relative to the root;
    `promised` is what its fingerprints say, `content` what the tensors hold now. `files`: they follow also where all
    engines take it. `sending` is None where engines open the tensors themselves.
    """

    name: str
    version: str
    path: str
    promised: int
    content: int
    files: bool = True
    sending: Sending | None = None
    is_lent: bool = True
    readers: int = 0

    def arrived(self) -> "SimOffer":
        """What a receiver holds after the last byte, which outlives the trainer's own."""
        content = ~self.content if self.sending is Sending.OTHER else self.content
        return replace(self, content=content, is_lent=True, readers=0)
