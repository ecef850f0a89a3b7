"""Cases of the simulation. A case follows from its seed alone: neither the folder of the clone, nor what is imported,
nor the order of hashes changes a step.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from refitd.policy.strategy import StrategyName

from .forgetting import ForgettingHosts
from .forgetting_steps import FORGETTING_RULES, ForgettingStory
from .led_hosts import LedHosts
from .led_steps import LED_RULES, LedStory
from .steps import RULES, Draw, Story
from .store_steps import STORE_RULES, StoreStory
from .store_world import StoreWorld
from .world import NAMES, World

RUN_STEPS = 50
VLLM = 0.5  # of the engines
MOST_FOLLOWERS = 3
LED = 0.5  # of the cases with several hosts
BY_PLUGINS = ("publish", "train_on_sent", "loads_fail")  # what shows all that plugins do, where all engines have one


@dataclass(frozen=True, slots=True)
class Step:
    """A method of `Story`, and its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        said = ", ".join(f"{name}={_said(value)}" for name, value in self.arguments.items())
        return f"story.{self.name}({said})"


@dataclass(frozen=True, slots=True)
class Case:
    """A world and the steps that are taken in it. `vllm` and `plugged` as of `World`, `followers` as of `Hosts`, 0 for
    one host. `led`: the hub leads its followers. `store`: they follow an object store.
    """

    seed: int
    strategy: StrategyName
    vllm: str
    plugged: bool | None
    steps: tuple[Step, ...]
    followers: int = 0
    led: bool = False
    store: bool = False

    def __str__(self) -> str:
        arguments = f"{self.seed}, strategy={_said(self.strategy)}, vllm={self.vllm!r}"
        if self.plugged:
            arguments += ", plugged=True"
        if self.followers:
            arguments += f", followers={self.followers}"
        world, story = self.of
        made, story = f"{world.__name__}({arguments})", story.__name__
        return "\n    ".join(
            [f"with closing({made}) as world:", f"story = {story}(world)", *map(str, self.steps), "world.heal()"]
        )

    @property
    def of(self) -> tuple[type[World], type[Story]]:
        if not self.followers:
            return World, Story
        if self.store:
            return StoreWorld, StoreStory
        return (LedHosts, LedStory) if self.led else (ForgettingHosts, ForgettingStory)


def _said(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_said, value))}]"
    return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)


def drawn(seed: int) -> Case:
    """The case of a seed. It knows some of the rules only, so that cases differ in what they do often. In every
    third one all engines have the plugin and go on at once: no others take what a trainer lends or sends.
    """
    if seed % 3 == 0:
        case = _drawn(random.Random(seed), RULES, always=BY_PLUGINS)
        return replace(case, strategy=StrategyName.ALL, plugged=True)
    return _drawn(random.Random(seed), RULES)


def drawn_of_hosts(seed: int) -> Case:
    led, chance = random.Random(~seed).random() < LED, random.Random(seed)
    case = _drawn(chance, LED_RULES if led else FORGETTING_RULES)
    return replace(case, followers=chance.randint(1, MOST_FOLLOWERS), led=led)


def drawn_of_stores(seed: int) -> Case:
    chance = random.Random(seed)
    return replace(_drawn(chance, STORE_RULES), followers=chance.randint(1, MOST_FOLLOWERS), store=True)


def _drawn(chance: random.Random, known: Mapping[str, Mapping[str, Draw]], *, always: Sequence[str] = ()) -> Case:
    share = chance.random()
    rules = [name for name in known if chance.random() < share] or list(known)
    rules += 2 * list(always)
    steps = (_step(chance.choice(rules), known, chance) for _ in range(RUN_STEPS))
    return Case(chance.getrandbits(32), chance.choice(list(StrategyName)), some_engines(chance), None, tuple(steps))


def some_engines(chance: random.Random) -> str:
    """The names of the engines that are vLLM: none, some or all of them."""
    return "".join(name for name in NAMES if chance.random() < VLLM)


def _step(name: str, known: Mapping[str, Mapping[str, Draw]], chance: random.Random) -> Step:
    return Step(name, {argument: draw(chance) for argument, draw in known[name].items()})


def played(case: Case) -> Story:
    """Take the steps, let everything heal, and see that every promise holds.

    Raises:
        AssertionError: one does not.
    """
    with closing(_world(case)) as world:
        story = case.of[1](world)
        for step in case.steps:
            getattr(story, step.name)(**step.arguments)
        world.heal()
    return story


def _world(case: Case) -> World:
    followers = {"followers": case.followers} if case.followers else {"plugged": case.plugged}
    return case.of[0](case.seed, strategy=case.strategy, vllm=case.vllm, **followers)


def shortest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Leave out steps as long as the case still fails: large pieces first, then one at a time."""
    size = len(case.steps) // 2
    while size:
        shorter = _without(case, size, fails)
        size = size if size == 1 and shorter != case else size // 2
        case = shorter
    return case


def _without(case: Case, size: int, fails: Callable[[Case], bool]) -> Case:
    start = 0
    while start < len(case.steps):
        steps: Sequence[Step] = case.steps
        shorter = replace(case, steps=(*steps[:start], *steps[start + size :]))
        if fails(shorter):
            case = shorter
        else:
            start += size
    return case
