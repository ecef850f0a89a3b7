"""What may happen in a simulation of several hosts whose hub may lose its disk, beside what may happen to any."""

from .forgetting import ForgettingHosts
from .host_steps import HOST_RULES, HostStory
from .steps import Draw, may, one_of

FORGETTING_RULES: dict[str, dict[str, Draw]] = dict(HOST_RULES)
TRAINER = one_of(["goes on", "begins first", "begins then"])
SECONDS = one_of([0.0, 0.5, 3.0, 20.0])
DELTA = one_of([False, True])


class ForgettingStory(HostStory):
    """Anything may happen, and the hub may lose what it knows."""

    world: ForgettingHosts

    @may(FORGETTING_RULES, steps=one_of(range(4)), seconds=one_of([0.0, 2.0, 20.0]))
    def hub_is_copied_and_goes_on(self, steps: int, seconds: float) -> None:
        self.do(lambda world: world.back_up())
        for _ in range(steps):
            self._publish(delta=False, then=seconds)

    @may(FORGETTING_RULES, emptied=one_of([False, True]), trainer=TRAINER, seconds=SECONDS, delta=DELTA)
    def hub_loses_its_disk(self, emptied: bool, trainer: str, seconds: float, delta: bool) -> None:
        self.do(lambda world: world.lose_disk(emptied=emptied, begins=trainer == "begins first"), then=seconds)
        if trainer == "begins then":
            self.do(lambda world: world.begin_training_again())
        self._publish(delta=delta, then=seconds)
