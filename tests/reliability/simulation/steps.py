"""What may happen in a simulation, in any order, and which arguments are drawn for it."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .disk import Make
from .fault import Call, Fault
from .offer import Sending
from .world import World

Draw = Callable[[random.Random], Any]
Rule = TypeVar("Rule", bound=Callable[..., None])

RULES: dict[str, dict[str, Draw]] = {}  # the names of methods of `Story`, and how each of their arguments is drawn


def one_of(values: Iterable[Any]) -> Draw:
    known = list(values)
    return lambda chance: chance.choice(known)


def several(values: Sequence[Any], *, most: int) -> Draw:
    return lambda chance: [chance.choice(values) for _ in range(chance.randint(1, most))]


def may(_rules: dict[str, dict[str, Draw]] = RULES, /, **arguments: Draw) -> Callable[[Rule], Rule]:
    def take(method: Rule) -> Rule:
        _rules[method.__name__] = arguments
        return method

    return take


CALLS = list(Call)
WRITTEN = [make for make in Make if make is not Make.DELTA]
MAKES = one_of([*[Make.GOOD] * 6, *WRITTEN])
FAILURES = (Fault.REFUSES, Fault.ROLLBACK, Fault.UNCLEAR, Fault.UNFLUSHED)
ENGINES = one_of("abc")
DISK_FAULTS = ("error", "unmounted", "empty", "unreadable", "full", "no room")
INDEX = one_of(range(31))


class Story:
    """Anything may happen at any time, and the promises are looked at after each step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0

    def do(self, act: Callable[[World], None], *, then: float | None = None) -> None:
        """One thing happens, and `then` time passes (seconds)."""
        self.steps += 1
        act(self.world)
        self.world.hold()
        if then is not None:
            self.do(lambda world: world.wait(then))

    @may(seconds=one_of([0.01, 0.1, 0.3, 0.3, 1.0, 3.0, 10.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.do(lambda world: world.wait(seconds))

    @may(make=MAKES, announce=one_of([False, True]), seconds=one_of([0.0, 0.2, 2.0]))
    def publish(self, make: Make, announce: bool, seconds: float) -> None:
        self.do(lambda world: world.publish(make, announce=announce), then=seconds)

    @may(
        back=one_of([0, 0, 0, 1, 2, 4]),
        announce=one_of([False, True]),
        honest=one_of([True] * 9 + [False]),
        seconds=one_of([0.0, 0.01, 0.2, 2.0]),
    )
    def publish_a_delta(self, back: int, announce: bool, honest: bool, seconds: float) -> None:
        self.do(lambda world: world.publish_delta(back, announce=announce, honest=honest), then=seconds)

    @may(steps=one_of(range(2, 6)), seconds=one_of([0.1, 0.5, 2.0]))
    def train_on(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.do(lambda world: world.publish_delta(0, announce=True, honest=True), then=seconds)

    @may(seconds=one_of([0.0, 0.05, 0.2, 2.0]), files=one_of([True, False]))
    def hand_over(self, seconds: float, files: bool = True) -> None:
        self.do(lambda world: world.hand_over(files=files), then=seconds)

    @may(sending=one_of(Sending), files=one_of([True, False]), seconds=one_of([0.0, 0.5, 2.0, 40.0]))
    def send(self, sending: Sending, files: bool, seconds: float) -> None:
        """Over a process group; until the trainer does something else its sender is there."""
        self.do(lambda world: world.hand_over(files=files, sending=sending), then=seconds)

    @may(steps=one_of(range(2, 5)), files=one_of([True, False]))
    def train_on_sent(self, steps: int, files: bool) -> None:
        """Each step after engines have had the time to receive the one before."""
        for _ in range(steps):
            self.do(lambda world: world.hand_over(files=files, sending=Sending.WHOLE), then=3.0)
            self.do(lambda world: world.take_back(announce=True), then=2.0)

    @may(steps=one_of(range(2, 5)), seconds=one_of([0.2, 2.0]))
    def train_on_in_memory(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.do(lambda world: world.hand_over(files=False))
            self.do(lambda world: world.take_back(announce=True), then=seconds)

    @may(
        name=one_of("ab"),
        faults=several(FAILURES, most=4),
        hands_over=one_of([False, True]),
        seconds=one_of([0.2, 2.0]),
    )
    def loads_fail(self, name: str, faults: list[Fault], hands_over: bool, seconds: float) -> None:
        for fault in faults:
            self.do(lambda world, fault=fault: world.fault(name, Call.LOAD, fault))
            if hands_over:
                self.do(lambda world: world.hand_over())
            else:
                self.do(lambda world: world.publish_delta(0, announce=True, honest=True))
            self.do(lambda world: world.wait(seconds))

    @may(
        name=ENGINES, call=one_of(CALLS), fault=one_of(Fault), plain=one_of([False, True]), seconds=one_of([2.0, 40.0])
    )
    def update_goes_wrong(self, name: str, call: Call, fault: Fault, plain: bool, seconds: float) -> None:
        """In one call of it. Of a `plain` version the engine's own load is asked for, plugin or not."""
        self.do(lambda world: world.fault(name, call, fault))
        self.do(lambda world: world.publish(Make.PLAIN if plain else Make.GOOD, announce=True), then=seconds)

    @may(announce=one_of([False, True]), fails=one_of([False, False, True]))
    def trainer_takes_its_tensors_back(self, announce: bool, fails: bool) -> None:
        self.do(lambda world: world.take_back(announce=announce, fails=fails))

    @may()
    def trainer_dies_and_comes_back(self) -> None:
        self.do(lambda world: world.kill_trainer())

    @may(named=one_of([True, True, False]), seconds=one_of([0.0, 0.1, 2.0]))
    def engine_is_added_or_removed(self, named: bool, seconds: float) -> None:
        self.do(lambda world: world.name_engine(named=named), then=seconds)

    @may(name=ENGINES, away=one_of([False, True]), seconds=one_of([0.0, 0.1, 2.0]))
    def engine_is_moved_to_another_run_or_back(self, name: str, away: bool, seconds: float) -> None:
        self.do(lambda world: world.move_engine(name, away=away), then=seconds)

    @may(closed=one_of([False, True]), seconds=one_of([0.0, 2.0, 10.0]))
    def run_is_closed_or_opened(self, closed: bool, seconds: float) -> None:
        self.do(lambda world: world.close_run(closed=closed), then=seconds)

    @may()
    def publish_out_of_order(self) -> None:
        self.do(lambda world: world.publish_late(Make.GOOD))

    @may()
    def trainer_restarts_and_reuses_steps(self) -> None:
        self.do(lambda world: world.restart_trainer())

    @may(back=one_of(range(4)))
    def same_notice_again(self, back: int) -> None:
        self.do(lambda world: world.announce(max(1, world.step - back)))

    @may()
    def roll_back(self) -> None:
        self.do(lambda world: world.roll_back())

    @may(index=INDEX, pinned=one_of([False, True]))
    def pin(self, index: int, pinned: bool) -> None:
        self.do(lambda world: world.pin(index, pinned=pinned))

    @may()
    def sweep(self) -> None:
        self.do(lambda world: world.sweep())

    @may(name=ENGINES)
    def resync(self, name: str) -> None:
        self.do(lambda world: world.resync(name))

    @may(seconds=one_of([0.0, 0.5, 20.0]))
    def service_is_killed_and_started_again(self, seconds: float) -> None:
        self.do(lambda world: world.kill(), then=seconds)
        self.do(lambda world: world.start())

    @may(table=one_of(["versions", "versions", "updates", "engines", "attempts", "events"]), index=INDEX)
    def journal_has_a_bad_row(self, table: str, index: int) -> None:
        self.do(lambda world: world.spoil_journal(table, index))

    @may(name=ENGINES)
    def engine_is_killed(self, name: str) -> None:
        self.do(lambda world: world.kill_engine(name))

    @may(name=ENGINES)
    def engine_restarts(self, name: str) -> None:
        self.do(lambda world: world.start_engine(name))

    @may(name=ENGINES, call=one_of([*[Call.LOAD] * 4, *CALLS]), fault=one_of(Fault))
    def call_goes_wrong(self, name: str, call: Call, fault: Fault) -> None:
        self.do(lambda world: world.fault(name, call, fault))

    @may(name=ENGINES, seconds=one_of([0.1, 3.0, 20.0]))
    def engine_sleeps_for_a_while(self, name: str, seconds: float) -> None:
        self.do(lambda world: world.put_to_sleep(name, asleep=True), then=seconds)
        self.do(lambda world: world.put_to_sleep(name, asleep=False))

    @may(name=ENGINES, loads=one_of([False, True]), seconds=one_of([2.0, 40.0]))
    def call_of_someone_else_fails(self, name: str, loads: bool, seconds: float) -> None:
        self.do(lambda world: world.misuse(name))
        if loads:
            self.do(lambda world: world.fault(name, Call.LOAD, Fault.UNCLEAR))
            self.do(lambda world: world.publish(Make.PLAIN, announce=True))
        self.do(lambda world: world.wait(seconds))

    @may(name=ENGINES, seconds=one_of([0.2, 3.0, 20.0]))
    def witness_lies(self, name: str, seconds: float) -> None:
        self.do(lambda world: world.lie(name, lies=True))
        self.do(lambda world: world.publish(Make.GOOD, announce=True), then=seconds)
        self.do(lambda world: world.lie(name, lies=False))

    @may(name=ENGINES)
    def label_is_set_by_someone_else(self, name: str) -> None:
        self.do(lambda world: world.relabel(name))

    @may(name=ENGINES, seconds=one_of([0.05, 3.0]), times=one_of([1, 1, 1, 2, 6]))
    def another_writer_loads_into_an_engine(self, name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            self.do(lambda world: world.write_as_another(name), then=seconds)

    @may(index=INDEX)
    def trainer_deletes_a_version(self, index: int) -> None:
        self.do(lambda world: world.take_away(index))

    @may(how_many=one_of([1, 1, 31]), restored=one_of([False, True]), seconds=one_of([0.5, 3.0, 10.0]))
    def newest_is_lost(self, how_many: int, restored: bool, seconds: float) -> None:
        self.do(lambda world: world.take_away_newest(how_many), then=seconds)
        if restored:
            for index in range(31):
                self.do(lambda world, index=index: world.restore(index))

    @may(index=INDEX)
    def files_are_restored(self, index: int) -> None:
        self.do(lambda world: world.restore(index))

    @may(index=INDEX, make=MAKES)
    def path_is_rewritten(self, index: int, make: Make) -> None:
        self.do(lambda world: world.rewrite(index, make))

    @may(kind=one_of(DISK_FAULTS), seconds=one_of([0.5, 9.0]))
    def disk_fails_for_a_while(self, kind: str, seconds: float) -> None:
        self.do(lambda world: world.disk_fault(kind), then=seconds)
        self.do(lambda world: world.heal_disk())

    @may(days=one_of([-1.0, 0.0, 1.0]))
    def clock_is_set(self, days: float) -> None:
        self.do(lambda world: world.set_wall_clock(days))
