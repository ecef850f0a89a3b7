"""What each round does: pure, from the seed alone. Only the times at which things happen differ between two runs."""

import random
from dataclasses import dataclass
from enum import Enum, auto

AGAIN = 0.2  # the share of rounds in which the service is killed once more while it mends the first kill
SLICES = 7  # of a load by a real SGLang; it takes about ten
MAX_DELAY = 1.0


VLLM = "vllm"  # one that tells no versions


class Victim(Enum):
    """Who is killed."""

    PUBLISHER = auto()
    SERVICE = auto()
    ENGINE = auto()

    def __str__(self) -> str:
        return self.name.lower()


class Point(Enum):
    """What is waited for before the random delay."""

    BEGUN = "the publisher began"
    PUBLISHED = "it was published"
    UPDATING = "an engine was told"
    VERIFYING = "an engine had loaded it"
    SERVED = "it was served"
    MID_LOAD = "sglang began to load it"


DELAYS = {
    Point.BEGUN: 0.025,
    Point.PUBLISHED: 0.06,
    Point.UPDATING: 0.09,
    Point.VERIFYING: 0.01,
    Point.SERVED: 0.3,
    Point.MID_LOAD: 0.0,
}
ORDINARY = [
    *[(Victim.SERVICE, point, 2) for point in Point if point is not Point.MID_LOAD],
    (Victim.PUBLISHER, Point.BEGUN, 3),
    (Victim.PUBLISHER, Point.PUBLISHED, 1),
    (Victim.PUBLISHER, Point.UPDATING, 1),
    (Victim.ENGINE, Point.UPDATING, 2),
    (Victim.ENGINE, Point.VERIFYING, 1),
    (Victim.ENGINE, Point.SERVED, 1),
]
IN_MID_LOAD = [(Victim.SERVICE, 7), (Victim.PUBLISHER, 3), (Victim.ENGINE, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round. Times are seconds.

    `engine` is the one that is killed, and the one whose progress is watched. `again` is when a service that was
    started again is killed once more. A real SGLang is stopped `slices` into its load; it goes on `thaw` after the
    victim's end, or after its new start where `thaw_late`.
    """

    number: int
    seed: str
    victim: Victim
    point: Point
    engine: str
    delay: float
    again: float | None = None
    slices: int = 0
    thaw: float = 0.0
    thaw_late: bool = False

    @property
    def chance(self) -> random.Random:
        """Randomness for what the round decides on its way."""
        return random.Random(f"{self.seed} on its way")


def rounds(seed: int, count: int, mid_load: int, engines: list[str], sglang: str | None) -> list[Round]:
    """`count` rounds that kill, `mid_load` of them while `sglang` loads."""
    chance = random.Random(seed)
    in_mid_load = min(mid_load, count) if sglang is not None else 0
    kinds = ["mid-load"] * in_mid_load + ["ordinary"] * (count - in_mid_load)
    chance.shuffle(kinds)
    return [_round(f"{seed}:{number}", number, kind, engines, sglang) for number, kind in enumerate(kinds, start=1)]


def another_mid_load(seed: int, number: int, sglang: str) -> Round:
    """One more, for one that missed."""
    return _round(f"{seed}:{number}", number, "mid-load", [], sglang)


def _round(seed: str, number: int, kind: str, engines: list[str], sglang: str | None) -> Round:
    chance = random.Random(seed)
    if kind == "mid-load" and sglang is not None:
        return _mid_load(seed, number, chance, sglang)
    (victim, point, _) = chance.choices(ORDINARY, weights=[weight for *_, weight in ORDINARY])[0]
    again = chance.uniform(0.0, MAX_DELAY) if victim is Victim.SERVICE and chance.random() < AGAIN else None
    # A real SGLang takes 20 s to start: it is killed in mid-load alone.
    able = [name for name in engines if victim is not Victim.ENGINE or name != sglang]
    return Round(
        number=number,
        seed=seed,
        victim=victim,
        point=point,
        engine=chance.choice(able),
        delay=chance.uniform(0.0, DELAYS[point]),
        again=again,
    )


def _mid_load(seed: str, number: int, chance: random.Random, sglang: str) -> Round:
    victim = chance.choices([v for v, _ in IN_MID_LOAD], weights=[weight for _, weight in IN_MID_LOAD])[0]
    return Round(
        number=number,
        seed=seed,
        victim=victim,
        point=Point.MID_LOAD,
        engine=sglang,
        delay=0.0,
        again=chance.uniform(0.0, MAX_DELAY) if victim is Victim.SERVICE and chance.random() < AGAIN else None,
        slices=chance.randrange(SLICES),
        thaw=chance.choice([0.0, chance.uniform(0.0, 0.5)]),
        thaw_late=chance.random() < 0.5,
    )
