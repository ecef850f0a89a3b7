"""How a journal began, and whether what an earlier one knew has been found again."""

from dataclasses import dataclass

from refitd.root.mark import RootMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The journal's first record, written when it is made. A journal without it was never used.

    `cause` says why an empty journal began on a root that was in use, None where the root was new. `lost` says that an
    earlier journal is gone, and with it what it knew of the engines' contents. `rebuilt` is False until the root was
    listed and every engine asked: nothing is collected before. It is on disk, so a kill in between changes nothing.
    `root` is the root that it is about, None until that has a mark.
    """

    cause: str | None = None
    lost: bool = False
    rebuilt: bool = True
    root: RootMark | None = None


NEW = Origin()
