"""The promise of early looks under whatever comes: what an engine serves is a committed version, by every bit, and a
version is refused only if its files are not what its manifest says.

One in `LOOK_SHARE` of the simulation's steps (`test_simulation.py`) is taken here, and at least 1,200.
"""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from simulation.looks import MOST, Looks
from simulation.test_simulation import FIRST, SHARES, STEPS
from support.following import published, root_in_memory

LOOK_SHARE = 2
LOOK_STEPS = max(STEPS // LOOK_SHARE, 1200 if STEPS > 1 else 1)
MOST_STEPS = 100  # of a case
SHOWN = ("taken over", "looked", "ahead", "served", "unproved", "restored")


@pytest.fixture(scope="module")
def wanted() -> Iterator[Path]:
    with root_in_memory() as root:
        for step in range(1, MOST + 1):
            published(root, step)
        yield root


@pytest.mark.points
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_what_an_engine_serves_that_looks_early_was_committed_and_proved_whatever_comes(
    share: int, wanted: Path
) -> None:
    seen, seeds, steps = Counter[str](), count(FIRST + share, SHARES), -(-(LOOK_STEPS - share) // SHARES)
    while seen["steps"] < steps:
        seen += _seen(next(seeds), wanted)
    print(dict(seen))
    if STEPS in {1200, 3000} and SHARES == 1:
        assert min(seen[what] for what in SHOWN) > 0


def _seen(seed: int, wanted: Path) -> Counter[str]:
    """What happened in the case of a seed. A failure says how to have it again."""
    chance, story = random.Random(seed), list[str]()
    with root_in_memory() as root, pytest.MonkeyPatch.context() as patch:
        case = Looks(root, wanted, chance, patch)
        try:
            for _ in range(chance.randint(MOST_STEPS // 4, MOST_STEPS)):
                step = case.draw()
                story.append(step.__name__)
                step(case)
                case.hold()
            case.heal()
        except Exception as error:
            error.add_note(f"to have it again: make simulation SEED={seed} STEPS=1\n{', '.join(story)}")
            raise
        finally:
            case.turns.end()
        return case.seen + Counter(steps=len(story))
