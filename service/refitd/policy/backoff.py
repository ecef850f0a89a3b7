"""How long to wait before something is tried again: exponential with jitter, so that a fleet does not knock as one.

Source: Marc Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

import random

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0


def backoff(failures: int, chance: random.Random) -> float:
    """Seconds to wait after `failures` (1 or more) failures in a row."""
    longest = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(failures - 1, 10))
    return longest * (0.5 + 0.5 * chance.random())
