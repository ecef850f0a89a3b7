"""Which of many crash points, power cuts or seeds a run tries: all, or every third in `make test`,
`make reliability` and `make sglang`.

Which third is drawn from the commit, so that the commits of a day try all of them in turn; `make thorough`, which
.ci/run has as well, sets REFITD_EVERY_POINT and tries every one that needs no real engine.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
EVERY = "REFITD_EVERY_POINT" in os.environ
STRIDE = 1 if EVERY else 3


def _drawn_by_the_commit() -> int:
    """A number below STRIDE; 0 where the tree is no clone of a repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(asked.stdout or "0", 16) % STRIDE


FIRST = 0 if EVERY else _drawn_by_the_commit()


def taken(points: Iterable[T]) -> Iterator[T]:
    """Those of the points that this run tries."""
    return islice(points, FIRST, None, STRIDE)


def numbers() -> Iterator[int]:
    """Those of 1, 2, 3, … that this run tries."""
    return taken(count(1))
