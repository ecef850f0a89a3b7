"""What may happen in a simulation of several hosts that their hub leads, beside what may happen to any."""

from collections.abc import Callable
from typing import Any

from .fault import Call, Fault
from .forgetting_steps import FORGETTING_RULES, ForgettingStory
from .host_steps import ENGINE, HOST, MOMENT
from .led_hosts import LedHosts
from .links import Damage
from .orders import Stage
from .steps import DISK_FAULTS, FAILURES, INDEX, Draw, may, one_of, several

LED_RULES: dict[str, dict[str, Draw]] = dict(FORGETTING_RULES)
STAGE = one_of(Stage)
DELTA = one_of([False, True])
SECONDS = one_of([0.0, 0.5, 3.0, 20.0])
# SLOW: most of these come when the hub has given up on them, and many after a newer one.
ORDERS = [Damage.CUT, Damage.STALL, Damage.LOST, Damage.SLOW]
GIVEN_UP = 5.2  # seconds after which a hub waits for the answer to an order no longer
SLOW = one_of([0.0, 0.05, 1.0])  # of the link, so that there is time between an order and its answer
ORDER = {"host": HOST, "stage": STAGE, "slow": SLOW, "after": MOMENT, "delta": DELTA}


class LedStory(ForgettingStory):
    """Anything may happen while a hub orders, and the promises are looked at after each step."""

    world: LedHosts

    @may(LED_RULES, **ORDER, seconds=SECONDS)
    def hub_is_killed_in_an_order(self, seconds: float, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.kill(), seconds)
        self.do(lambda world: world.start())

    @may(LED_RULES, **ORDER, seconds=SECONDS)
    def host_is_killed_in_an_order(self, seconds: float, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.host(order["host"]).kill(), seconds)
        self.do(lambda world: world.host(order["host"]).start())

    @may(LED_RULES, **ORDER, whole=one_of([False, True]), seconds=one_of([0.5, 3.0, 12.0, 45.0]))
    def link_is_cut_in_an_order(self, whole: bool, seconds: float, **order: Any) -> None:
        def cut(world: LedHosts, *, is_cut: bool) -> None:
            (world.cut if whole else world.cut_orders)(order["host"], cut=is_cut)

        self._in_an_order(order, lambda world: cut(world, is_cut=True))
        self._publish(delta=order["delta"], then=seconds)
        self.do(lambda world: cut(world, is_cut=False))

    @may(
        LED_RULES,
        host=HOST,
        orders=several(ORDERS, most=6),
        others=one_of([[], [], *([each] for each in Damage)]),
        delta=DELTA,
    )
    def orders_are_lost_or_not_answered_or_come_late(
        self, host: int, orders: list[Damage], others: list[Damage], delta: bool
    ) -> None:
        self.do(lambda world: world.damage_orders(host, orders, others))
        self._publish(delta=delta)
        self.do(lambda world: world.wait(3.0))
        self._publish(delta=delta)
        self.do(lambda world: world.wait(8.0))

    @may(LED_RULES, host=HOST, late=one_of([1, 2, 3]), lost=one_of([[], [Damage.LOST]]), seconds=SECONDS, back=DELTA)
    def order_comes_after_a_newer_one(
        self, host: int, late: int, lost: list[Damage], seconds: float, back: bool
    ) -> None:
        """The hub publishes once more, or its operator goes `back`, as soon as it has given up on the late ones."""
        self.do(lambda world: world.damage_orders(host, [Damage.SLOW] * late + lost, []))
        self._publish(delta=False)
        self.do(lambda world: world.until_an_order(host, Stage.SENT), then=GIVEN_UP)
        if back:
            self.do(lambda world: world.roll_back())
        else:
            self._publish(delta=True)
        self.do(lambda world: world.wait(seconds))

    @may(LED_RULES, host=HOST, number=INDEX, behind=one_of([1, 1, 2]))
    def somebody_orders_who_does_not_lead(self, host: int, number: int, behind: int) -> None:
        self.do(lambda world: world.order_as_another(host, number, behind=behind))

    @may(LED_RULES, host=HOST, stage=STAGE, slow=SLOW, after=MOMENT, emptied=one_of([False, True]), delta=DELTA)
    def hub_loses_its_disk_in_an_order(self, emptied: bool, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.lose_disk(emptied=emptied, begins=False))

    @may(LED_RULES, **ORDER, seconds=SECONDS)
    def operator_rolls_back_in_an_order(self, seconds: float, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.roll_back(), seconds)

    @may(LED_RULES, **ORDER, seconds=SECONDS)
    def operator_pauses_in_an_order(self, seconds: float, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.pause_updates(paused=True))
        self._publish(delta=order["delta"], then=seconds)
        self.do(lambda world: world.pause_updates(paused=False))

    @may(LED_RULES, **ORDER, seconds=SECONDS)
    def operator_of_a_host_pauses_it_in_an_order(self, seconds: float, **order: Any) -> None:
        self._in_an_order(order, lambda world: world.host(order["host"]).pause_updates(paused=True))
        self._publish(delta=order["delta"], then=seconds)
        self.do(lambda world: world.host(order["host"]).pause_updates(paused=False))

    @may(LED_RULES, host=HOST, seconds=SECONDS)
    def operator_asks_for_a_resync_of_a_host(self, host: int, seconds: float) -> None:
        self.do(lambda world: world.resync(world.host(host).name), then=seconds)

    @may(
        LED_RULES,
        host=HOST,
        name=ENGINE,
        faults=several(FAILURES, most=4),
        delta=DELTA,
        seconds=one_of([0.2, 2.0, 9.0]),
    )
    def engine_of_a_host_fails_what_is_ordered(
        self, host: int, name: str, faults: list[Fault], delta: bool, seconds: float
    ) -> None:
        for fault in faults:
            self.do(lambda world, fault=fault: world.host(host).goes_wrong(name, Call.LOAD, fault))
            self._publish(delta=delta)
            self.do(lambda world: world.wait(seconds))

    @may(
        LED_RULES, host=HOST, kind=one_of([*DISK_FAULTS, "no room", "full"]), stage=STAGE, delta=DELTA, seconds=SECONDS
    )
    def disk_of_a_host_fails_in_an_order(self, host: int, kind: str, stage: Stage, delta: bool, seconds: float) -> None:
        self._in_an_order(
            {"host": host, "stage": stage, "slow": 0.05, "after": 0.0, "delta": delta},
            lambda world: world.host(host).disk_fault(kind),
        )
        self._publish(delta=delta, then=seconds)
        self.do(lambda world: world.host(host).heal_disk())

    def _in_an_order(self, order: dict[str, Any], act: Callable[[LedHosts], None], then: float | None = None) -> None:
        """Something happens when an order to a host has come to a stage, or a moment later."""
        self.do(lambda world: world.slow(order["host"], order["slow"]))
        self._publish(delta=order["delta"])
        self.do(lambda world: world.until_an_order(order["host"], order["stage"]), then=order["after"] or None)
        self.do(act)
        self.do(lambda world: world.slow(order["host"], 0.0))
        if then is not None:
            self.do(lambda world: world.wait(then))
