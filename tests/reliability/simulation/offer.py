"""A trainer's tensors in memory, lent as a version: whose they are, and whether anyone reads them now."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class SimOffer:
    """An offer of `version`, whose files will be at `path`. `name` is the file of the offer, relative to the root;
    `promised` is what its fingerprints say, `content` what the tensors hold now. `files`: they follow also where all
    engines take it.
    """

    name: str
    version: str
    path: str
    promised: int
    content: int
    files: bool = True
    is_lent: bool = True
    readers: int = 0
