"""The promises under whatever comes, in virtual time: a state machine that Hypothesis drives, and seeds that reproduce.

`make test` takes 10,000 steps or more, the same each time; `make soak` a million, others each time, in shares that
run side by side. REFITD_SIMULATION_STEPS says how many steps, REFITD_SIMULATION_SHARES how many shares.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import ClassVar

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from refitd.rollout.strategy import StrategyName
from simulation.disk import Make
from simulation.fault import Fault
from simulation.world import World

STEPS = int(os.environ.get("REFITD_SIMULATION_STEPS", "12000"))
SHARES = int(os.environ.get("REFITD_SIMULATION_SHARES", "1"))
RUN_STEPS = 50
SHRINK = "REFITD_SIMULATION_SHRINK" in os.environ  # minutes, for who looks into a failure
CALLS = (
    "/update_weights_from_disk",
    "/pause_generation",
    "/continue_generation",
    "/weights_checker",
    "/model_info",
    "/server_info",
    "prepare",
)
WRITTEN = [make for make in Make if make is not Make.DELTA]
MAKES = st.sampled_from([*[Make.GOOD] * 6, *WRITTEN])
FAILURES = (Fault.REFUSES, Fault.ROLLBACK, Fault.UNCLEAR, Fault.UNFLUSHED)
SHOWN = ("good", "delta", "taken", "refused", "restored", "unknown")  # what plugins have loaded, and answered
ENGINES = st.sampled_from("abc")
DISK_FAULTS = ("error", "unmounted", "empty", "unreadable", "full", "no room")
INDEX = st.integers(0, 30)


@pytest.fixture(autouse=True)
def quiet() -> Generator[None]:
    """A service that is killed ten thousand times has much to say."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


class Everything(RuleBasedStateMachine):
    """Anything may happen at any time. The promises are looked at all the while; in the end everything heals."""

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(seed=st.integers(0, 2**32), strategy=st.sampled_from(StrategyName))
    def begin(self, seed: int, strategy: StrategyName) -> None:
        self.world = World(seed, strategy=strategy)

    recycled: ClassVar[int] = 0
    copied: ClassVar[int] = 0
    by_plugins: ClassVar[Counter[str]] = Counter()  # see SHOWN

    def do(self, act: Callable[[World], None]) -> None:
        Everything.steps += 1
        assert self.world is not None
        act(self.world)
        self.world.promises.hold()

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 0.3, 1.0, 3.0, 10.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(lambda world: world.wait(seconds))

    @rule(make=MAKES, announce=st.booleans(), seconds=st.sampled_from([0.0, 0.2, 2.0]))
    def publish(self, make: Make, announce: bool, seconds: float) -> None:
        self.do(lambda world: world.publish(make, announce=announce))
        self.do(lambda world: world.wait(seconds))

    @rule(
        back=st.sampled_from([0, 0, 0, 1, 2, 4]),
        announce=st.booleans(),
        honest=st.sampled_from([True] * 9 + [False]),
        seconds=st.sampled_from([0.0, 0.01, 0.2, 2.0]),
    )
    def publish_a_delta(self, back: int, announce: bool, honest: bool, seconds: float) -> None:
        self.do(lambda world: world.publish_delta(back, announce=announce, honest=honest))
        self.do(lambda world: world.wait(seconds))

    @rule(steps=st.integers(2, 5), seconds=st.sampled_from([0.1, 0.5, 2.0]))
    def train_on(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.do(lambda world: world.publish_delta(0, announce=True, honest=True))
            self.do(lambda world: world.wait(seconds))

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.2, 2.0]))
    def hand_over(self, seconds: float) -> None:
        """Until the trainer does something else its tensors are lent."""
        self.do(lambda world: world.hand_over())
        self.do(lambda world: world.wait(seconds))

    @rule(
        name=st.sampled_from("ab"),
        faults=st.lists(st.sampled_from(FAILURES), min_size=1, max_size=4),
        hands_over=st.booleans(),
        seconds=st.sampled_from([0.2, 2.0]),
    )
    def loads_fail(self, name: str, faults: list[Fault], hands_over: bool, seconds: float) -> None:
        """Of versions that come right then."""
        for fault in faults:
            self.do(lambda world, fault=fault: world.fault(name, CALLS[0], fault))
            if hands_over:
                self.do(lambda world: world.hand_over())
            else:
                self.do(lambda world: world.publish_delta(0, announce=True, honest=True))
            self.do(lambda world: world.wait(seconds))

    @rule(announce=st.booleans(), fails=st.sampled_from([False, False, True]))
    def trainer_takes_its_tensors_back(self, announce: bool, fails: bool) -> None:
        self.do(lambda world: world.take_back(announce=announce, fails=fails))

    @rule()
    def trainer_dies_and_comes_back(self) -> None:
        self.do(lambda world: world.kill_trainer())

    @rule(named=st.sampled_from([True, True, False]), seconds=st.sampled_from([0.0, 0.1, 2.0]))
    def engine_is_added_or_removed(self, named: bool, seconds: float) -> None:
        self.do(lambda world: world.name_engine(named=named))
        self.do(lambda world: world.wait(seconds))

    @rule()
    def publish_out_of_order(self) -> None:
        self.do(lambda world: world.publish_late(Make.GOOD))

    @rule()
    def trainer_restarts_and_reuses_steps(self) -> None:
        self.do(lambda world: world.restart_trainer())

    @rule(back=st.integers(0, 3))
    def same_notice_again(self, back: int) -> None:
        self.do(lambda world: world.announce(max(1, world.step - back)))

    @rule()
    def roll_back(self) -> None:
        self.do(lambda world: world.roll_back())

    @rule(index=INDEX, pinned=st.booleans())
    def pin(self, index: int, pinned: bool) -> None:
        self.do(lambda world: world.pin(index, pinned=pinned))

    @rule()
    def sweep(self) -> None:
        self.do(lambda world: world.sweep())

    @rule(name=ENGINES)
    def resync(self, name: str) -> None:
        self.do(lambda world: world.resync(name))

    @rule(seconds=st.sampled_from([0.0, 0.5, 20.0]))
    def service_is_killed_and_started_again(self, seconds: float) -> None:
        self.do(lambda world: world.kill())
        self.do(lambda world: world.wait(seconds))
        self.do(lambda world: world.start())

    @rule(name=ENGINES)
    def engine_is_killed(self, name: str) -> None:
        self.do(lambda world: world.kill_engine(name))

    @rule(name=ENGINES)
    def engine_restarts(self, name: str) -> None:
        self.do(lambda world: world.start_engine(name))

    @rule(name=ENGINES, call=st.sampled_from([*[CALLS[0]] * 4, *CALLS]), fault=st.sampled_from(Fault))
    def call_goes_wrong(self, name: str, call: str, fault: Fault) -> None:
        self.do(lambda world: world.fault(name, call, fault))

    @rule(name=ENGINES)
    def label_is_set_by_someone_else(self, name: str) -> None:
        self.do(lambda world: world.relabel(name))

    @rule(index=INDEX)
    def trainer_deletes_a_version(self, index: int) -> None:
        self.do(lambda world: world.take_away(index))

    @rule(index=INDEX, make=MAKES)
    def path_is_rewritten(self, index: int, make: Make) -> None:
        self.do(lambda world: world.rewrite(index, make))

    @rule(kind=st.sampled_from(DISK_FAULTS), seconds=st.sampled_from([0.5, 9.0]))
    def disk_fails_for_a_while(self, kind: str, seconds: float) -> None:
        self.do(lambda world: world.disk_fault(kind))
        self.do(lambda world: world.wait(seconds))
        self.do(lambda world: world.heal_disk())

    @rule(days=st.sampled_from([-1.0, 0.0, 1.0]))
    def clock_is_set(self, days: float) -> None:
        self.do(lambda world: world.set_wall_clock(days))

    def teardown(self) -> None:
        if self.world is not None:
            try:
                self.world.heal()
                Everything.recycled += self.world.promises.recycled
                Everything.copied += self.world.promises.copied
                Everything.by_plugins += self.world.disk.counts
            finally:
                self.world.close()


@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_promise_holds_under_whatever_comes(share: int) -> None:
    before, recycled, copied, steps = Everything.steps, Everything.recycled, Everything.copied, STEPS // SHARES
    run_state_machine_as_test(
        Everything,
        settings=settings(
            max_examples=-(-steps // RUN_STEPS),
            stateful_step_count=RUN_STEPS,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
            derandomize="REFITD_SIMULATION_STEPS" not in os.environ,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(
        f"{Everything.steps - before} steps, {Everything.recycled - recycled} versions were recycled, "
        f"{Everything.copied - copied} times bytes of a copy were written; by plugins: {dict(Everything.by_plugins)}"
    )
    assert Everything.steps - before >= min(steps, 10_000)
    assert Everything.recycled - recycled > 100 or steps < 10_000
    assert Everything.copied - copied > 300 or steps < 10_000
    assert min(Everything.by_plugins[what] for what in SHOWN) > 20 or steps < 10_000


@pytest.mark.parametrize("seed", range(6))
def test_what_a_wait_calls_served_was_served_also_where_the_root_is_emptied(seed: int) -> None:
    """A trainer waits for what it has published, and not for something that had the name before. Its root is emptied
    under a journal that is kept; the engines restart or go on, and it could ask the service for its last step or not.
    """
    chance = random.Random(seed)
    world = World(seed, strategy=list(StrategyName)[seed % 3], waits=True)
    try:
        for _ in range(4):
            for _ in range(chance.randint(2, 5)):
                world.publish(Make.GOOD, announce=True)
                world.wait(chance.choice([0.1, 2.0, 5.0]))
                world.sweep()
            world.empty_root(asked=chance.random() < 0.3, whole=chance.random() < 0.5)
            if chance.random() < 0.7:
                world.start_engine(chance.choice("ab"))
        world.publish(Make.GOOD, announce=True)
        world.heal()
    finally:
        world.close()


@pytest.mark.parametrize("seed", range(6))
def test_engines_that_restart_in_a_pause_of_rollouts_are_brought_back_to_what_the_others_serve(seed: int) -> None:
    """Whether that is full or a delta, and whether they have the plugin; and to what came meanwhile when it is over."""
    chance = random.Random(seed)
    world = World(seed, strategy=list(StrategyName)[seed % 3])
    try:
        world.publish(Make.GOOD, announce=True)
        world.wait(5.0)
        for _ in range(4):
            for _ in range(chance.randint(0, 3)):
                world.publish_delta(0, announce=True, honest=True)
                world.wait(5.0)
            world.pause_rollouts(paused=True)
            for _ in range(chance.randint(0, 3)):
                world.publish_delta(chance.randint(0, 1), announce=True, honest=True)
            world.start_engine(chance.choice("ab"))
            if chance.random() < 0.3:
                world.kill()
                world.start()
            world.wait(30.0)
            world.promises.hold_in_a_pause()
            world.pause_rollouts(paused=False)
            world.wait(10.0)
        world.heal()
    finally:
        world.close()


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_reproduces_a_run(seed: int) -> None:
    assert story(seed) == story(seed)


def story(seed: int) -> list[str]:
    """What happens in a run whose steps are left to chance."""
    chance = random.Random(seed)
    world = World(seed, strategy=list(StrategyName)[seed % 3])
    try:
        for _ in range(20):
            if chance.random() < 0.5:
                world.publish(chance.choice([Make.GOOD, Make.GOOD, *WRITTEN]), announce=chance.random() < 0.5)
            else:
                world.publish_delta(chance.choice([0, 0, 1, 2]), announce=True, honest=True)
            world.fault(chance.choice("ab"), chance.choice(CALLS), chance.choice(list(Fault)))
            world.wait(chance.random() * 3)
            if chance.random() < 0.2:
                world.kill()
                world.start()
        world.heal()
        return world.trace
    finally:
        world.close()
