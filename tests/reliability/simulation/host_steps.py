"""What may happen in a simulation of several hosts: to the hub as to one host alone, to followers, and to links."""

from .disk import Make
from .fault import Call, Fault
from .hosts import Hosts
from .links import Damage
from .steps import CALLS, DISK_FAULTS, RULES, Draw, Story, may, one_of, several

AT_THE_HUB = (
    "time_passes",
    "publish",
    "publish_a_delta",
    "train_on",
    "publish_out_of_order",
    "trainer_restarts_and_reuses_steps",
    "trainer_deletes_a_version",
    "roll_back",
    "pin",
    "sweep",
    "service_is_killed_and_started_again",
    "engine_is_killed",
    "engine_restarts",
    "disk_fails_for_a_while",
    "clock_is_set",
)
HOST_RULES: dict[str, dict[str, Draw]] = {name: RULES[name] for name in AT_THE_HUB}
HOST_RULES["publish_a_delta"] = RULES["publish_a_delta"] | {"honest": one_of([True])}  # a liar's leads nowhere
HOST = one_of(range(4))
ENGINE = one_of("ab")
DAMAGES = several(list(Damage), most=6)
MOMENT = one_of([0.0, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0])  # in which a pull begins, goes on or ends


class HostStory(Story):
    """Anything may happen at any host, and the promises are looked at after each step."""

    world: Hosts

    @may(
        HOST_RULES,
        host=HOST,
        parts=DAMAGES,
        answers=one_of([[], [], *([each] for each in Damage)]),
        delta=one_of([False, True]),
        seconds=one_of([0.0, 0.5, 5.0, 30.0]),
    )
    def link_is_damaged(
        self, host: int, parts: list[Damage], answers: list[Damage], delta: bool, seconds: float
    ) -> None:
        self.do(lambda world: world.damage(host, parts, answers))
        self._publish(delta=delta, then=seconds)

    @may(HOST_RULES, host=HOST, after=MOMENT, seconds=one_of([0.5, 3.0, 12.0, 45.0]))
    def host_is_cut_off_for_a_while(self, host: int, after: float, seconds: float) -> None:
        """Something was published before, and something is published meanwhile."""
        self._publish(delta=True, then=after)
        self.do(lambda world: world.cut(host, cut=True))
        self._publish(delta=True, then=seconds)
        self.do(lambda world: world.cut(host, cut=False))

    @may(HOST_RULES, host=HOST, cut=one_of([False, True]))
    def host_is_cut_off_or_connected_again(self, host: int, cut: bool) -> None:
        self.do(lambda world: world.cut(host, cut=cut))

    @may(HOST_RULES, host=HOST, slow=one_of([0.0, 0.1, 1.0, 4.0]))
    def link_is_slow(self, host: int, slow: float) -> None:
        self.do(lambda world: world.slow(host, slow))

    @may(HOST_RULES, host=HOST, seconds=one_of([0.0, 0.5, 20.0]))
    def follower_is_killed_and_started_again(self, host: int, seconds: float) -> None:
        self.do(lambda world: world.host(host).kill(), then=seconds)
        self.do(lambda world: world.host(host).start())

    @may(HOST_RULES, host=HOST, after=MOMENT, hub=one_of([False, True]), delta=one_of([False, True]))
    def somebody_is_killed_in_a_pull(self, host: int, after: float, hub: bool, delta: bool) -> None:
        self._publish(delta=delta)
        self.do(lambda world: world.wait(0.3), then=after)
        self.do(lambda world: (world if hub else world.host(host)).kill(), then=0.5)
        self.do(lambda world: (world if hub else world.host(host)).start())

    @may(HOST_RULES, host=HOST, slow=one_of([0.5, 2.0, 8.0]), steps=one_of([2, 4, 8]))
    def hub_collects_what_a_follower_pulls(self, host: int, slow: float, steps: int) -> None:
        self.do(lambda world: world.slow(host, slow))
        for _ in range(steps):
            self._publish(delta=False, then=2.0)
            self.do(lambda world: world.sweep())
        self.do(lambda world: world.slow(host, 0.0))

    @may(HOST_RULES, host=HOST, kind=one_of(DISK_FAULTS), seconds=one_of([0.5, 9.0, 40.0]))
    def disk_of_a_follower_fails_for_a_while(self, host: int, kind: str, seconds: float) -> None:
        self.do(lambda world: world.host(host).disk_fault(kind))
        self._publish(delta=False, then=seconds)
        self.do(lambda world: world.host(host).heal_disk())

    @may(HOST_RULES, host=HOST, days=one_of([-1.0, 0.0, 1.0]))
    def clock_of_a_follower_is_set(self, host: int, days: float) -> None:
        self.do(lambda world: world.host(host).set_wall_clock(days))

    @may(HOST_RULES, host=HOST, name=ENGINE, starts=one_of([False, True]))
    def engine_of_a_follower_is_killed(self, host: int, name: str, starts: bool) -> None:
        self.do(lambda world: world.host(host).stop_engine(name, starts=starts))

    @may(HOST_RULES, host=HOST, name=ENGINE, call=one_of([*[Call.LOAD] * 4, *CALLS]), fault=one_of(Fault))
    def call_of_a_follower_goes_wrong(self, host: int, name: str, call: Call, fault: Fault) -> None:
        self.do(lambda world: world.host(host).goes_wrong(name, call, fault))

    @may(HOST_RULES, paused=one_of([False, True]), seconds=one_of([0.0, 2.0, 10.0]))
    def hub_pauses_updates_or_lets_them_go_on(self, paused: bool, seconds: float) -> None:
        self.do(lambda world: world.pause_updates(paused=paused))
        self._publish(delta=False, then=seconds)

    @may(HOST_RULES, host=HOST, paused=one_of([False, True]), seconds=one_of([0.0, 2.0, 10.0]))
    def operator_of_a_follower_pauses_it_or_lets_it_go_on(self, host: int, paused: bool, seconds: float) -> None:
        self.do(lambda world: world.host(host).pause_updates(paused=paused))
        self._publish(delta=False, then=seconds)

    @may(HOST_RULES, host=HOST)
    def follower_sweeps(self, host: int) -> None:
        self.do(lambda world: world.host(host).sweep())

    def _publish(self, *, delta: bool, then: float | None = None) -> None:
        if delta:
            self.do(lambda world: world.publish_delta(0, announce=True, honest=True), then=then)
        else:
            self.do(lambda world: world.publish(Make.GOOD, announce=True), then=then)
