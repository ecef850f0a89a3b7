"""How long to wait before the next try: one definition, for calls, engines, files and processes."""


def backoff(tried: int, first: float, longest: float, chance: float = 1.0) -> float:
    """Seconds before try number `tried` + 1: twice as long each time.

    `chance` is random, in [0, 1), where many begin at once and are not to come together again; it takes up to a half.
    """
    return min(first * 2.0 ** min(tried - 1, 30), longest) * (0.5 + chance / 2)
