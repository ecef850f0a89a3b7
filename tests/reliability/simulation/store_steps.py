"""What may happen in a simulation of hosts that follow a store: to it, to hosts, trainers and who collects."""

from .fault import Call, Fault
from .sim_bucket import StoreCall, StoreFault
from .steps import CALLS, DISK_FAULTS, RULES, Draw, Story, may, one_of, several
from .store_world import StoreWorld

STORE_RULES: dict[str, dict[str, Draw]] = {"time_passes": RULES["time_passes"]}
STORE_HOST = one_of(range(4))
STORE_ENGINE = one_of("ab")
TRAINER = one_of([0, 0, 1])
DELTA = one_of([False, True, True])
WITHIN = one_of([0.0, 0.02, 0.1, 3.0, 3.0, 20.0])  # the seconds for which a trainer is waited for
MOMENT = one_of([0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12])  # in which an upload or a collection is under way
WHO = one_of(["all", "host0", "host1", "trainer0", "trainer0", "trainer1", "collectors"])
CHANGES = [StoreCall.WRITE, StoreCall.CONDITION, StoreCall.CONDITION, StoreCall.UPLOAD, StoreCall.DELETE]
UNHEARD = [StoreFault.LOST, StoreFault.ASKED_AGAIN, StoreFault.LATE]


class StoreStory(Story):
    """Anything may happen to anybody, and the promises are looked at after each step."""

    world: StoreWorld

    @may(STORE_RULES, trainer=TRAINER, delta=DELTA, within=WITHIN)
    def trainer_publishes(self, trainer: int, delta: bool, within: float) -> None:
        self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=within))

    @may(STORE_RULES, trainer=TRAINER, delta=DELTA, steps=one_of(range(2, 6)), seconds=one_of([0.5, 2.0, 8.0]))
    def trainer_goes_on(self, trainer: int, delta: bool, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=5.0), then=seconds)

    @may(STORE_RULES, trainer=TRAINER, delta=DELTA, after=MOMENT, back=one_of([0, 0, 1, 2]), swept=DELTA)
    def trainer_is_killed_in_an_upload(self, trainer: int, delta: bool, after: float, back: int, swept: bool) -> None:
        self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=0.0), then=after)
        self.do(lambda world: world.restart_store_trainer(trainer, back=back))
        if swept:
            self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=5.0))
            self.do(lambda world: world.collect(within=5.0))

    @may(STORE_RULES, trainer=TRAINER, back=one_of([0, 0, 1]), seconds=one_of([0.0, 2.0, 10.0]))
    def who_publishes_is_killed_and_comes_again(self, trainer: int, back: int, seconds: float) -> None:
        self.do(lambda world: world.restart_store_trainer(trainer, back=back), then=seconds)

    @may(STORE_RULES, first=TRAINER, after=MOMENT, seconds=one_of([0.0, 1.0, 10.0]))
    def two_trainers_publish(self, first: int, after: float, seconds: float) -> None:
        """At once, or one after the other; and who was first publishes again, which it may not."""
        for trainer in (first, first + 1):
            self.do(lambda world, trainer=trainer: world.publish_to_store(trainer, delta=False, within=0.0), then=after)
        self.do(lambda world: world.wait(seconds))
        self.do(lambda world: world.publish_to_store(first, delta=False, within=5.0))

    @may(STORE_RULES, trainer=TRAINER)
    def trainer_that_says_that_it_has_lost_the_run_is_restarted(self, trainer: int) -> None:
        if self.world.trainer(trainer).is_lost:
            self.do(lambda world: world.restart_store_trainer(trainer, back=0))

    @may(STORE_RULES, within=WITHIN)
    def version_is_rolled_back(self, within: float) -> None:
        self.do(lambda world: world.roll_back_in_store(0, within=within))

    @may(STORE_RULES, within=WITHIN, seconds=one_of([0.0, 2.0, 10.0]), killed=one_of([False, False, True]))
    def hub_loses_the_files_of_what_it_has_pushed(self, within: float, seconds: float, killed: bool) -> None:
        self.do(lambda world: world.publish_to_store(0, delta=False, within=within))
        self.do(lambda world: world.lose_files_of_hub(then=seconds))
        if killed:
            self.do(lambda world: world.restart_store_trainer(0, back=0))

    @may(STORE_RULES, trainer=TRAINER, call=one_of(CHANGES), faults=several(list(StoreFault), most=3), delta=DELTA)
    def publication_goes_wrong(self, trainer: int, call: StoreCall, faults: list[StoreFault], delta: bool) -> None:
        self.do(lambda world: world.goes_wrong(f"trainer{trainer}", call, faults))
        self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=30.0))

    @may(STORE_RULES, trainer=TRAINER, delta=DELTA)
    def file_of_a_trainer_is_rotten(self, trainer: int, delta: bool) -> None:
        self.do(lambda world: world.rot(trainer))
        self.do(lambda world: world.publish_to_store(trainer, delta=delta, within=10.0))

    @may(STORE_RULES, trainer=TRAINER, at=one_of(range(5)), fault=one_of(UNHEARD), read=one_of([False, False, True]))
    def answer_to_a_conditional_write_is_lost(self, trainer: int, at: int, fault: StoreFault, read: bool) -> None:
        """That of `upload.json`, of the pointer or of another; the publisher may look then, or cannot `read`."""
        none = [StoreFault.SLOW] * at
        self.do(lambda world: world.goes_wrong(f"trainer{trainer}", StoreCall.CONDITION, [*none, fault]))
        if read:
            self.do(lambda world: world.goes_wrong(f"trainer{trainer}", StoreCall.READ, [*none, StoreFault.FAILS]))
        for _ in range(2):
            self.do(lambda world: world.publish_to_store(trainer, delta=True, within=60.0))

    @may(STORE_RULES, who=WHO, call=one_of(StoreCall), faults=several(list(StoreFault), most=6))
    def call_to_the_store_goes_wrong(self, who: str, call: StoreCall, faults: list[StoreFault]) -> None:
        self.do(lambda world: world.goes_wrong(who, call, faults))

    @may(STORE_RULES, seconds=one_of([0.5, 3.0, 12.0, 45.0]), delta=DELTA)
    def store_is_down_for_a_while(self, seconds: float, delta: bool) -> None:
        self.do(lambda world: world.publish_to_store(0, delta=delta, within=0.05))
        self.do(lambda world: world.set_down(down=True), then=seconds)
        self.do(lambda world: world.publish_to_store(0, delta=delta, within=5.0))
        self.do(lambda world: world.set_down(down=False))
        self.do(lambda world: world.publish_to_store(0, delta=delta, within=5.0))

    @may(STORE_RULES, who=WHO, after=one_of([0.0, 0.5, 3.0]), seconds=one_of([0.5, 3.0, 12.0, 45.0]))
    def somebody_is_cut_off_for_a_while(self, who: str, after: float, seconds: float) -> None:
        self.do(lambda world: world.publish_to_store(0, delta=True, within=after))
        self.do(lambda world: world.cut(who, cut=True))
        self.do(lambda world: world.publish_to_store(0, delta=False, within=after), then=seconds)
        self.do(lambda world: world.cut(who, cut=False))

    @may(
        STORE_RULES,
        host=STORE_HOST,
        reads=several([StoreFault.WRONG, StoreFault.CUT, *StoreFault], most=3),
        ranges=several([StoreFault.WRONG, StoreFault.CUT, *StoreFault], most=6),
        seconds=one_of([0.0, 0.5, 5.0, 30.0]),
    )
    def pull_is_damaged(self, host: int, reads: list[StoreFault], ranges: list[StoreFault], seconds: float) -> None:
        self.do(lambda world: world.goes_wrong(world.host(host).name, StoreCall.READ, reads))
        self.do(lambda world: world.goes_wrong(world.host(host).name, StoreCall.FILL, ranges))
        self.do(lambda world: world.publish_to_store(0, delta=False, within=5.0), then=seconds)

    @may(STORE_RULES, host=STORE_HOST, after=one_of([0.0, 0.05, 0.3, 1.0, 2.0]), seconds=one_of([0.0, 1.0, 35.0]))
    def follower_of_the_store_is_killed_in_a_pull(self, host: int, after: float, seconds: float) -> None:
        self.do(lambda world: world.publish_to_store(0, delta=True, within=5.0), then=after)
        self.do(lambda world: world.host(host).kill(), then=seconds)
        self.do(lambda world: world.host(host).start())

    @may(
        STORE_RULES,
        keep=one_of([None, None, 1, 2]),
        dry=one_of([False, False, False, True]),
        within=one_of([0.0, 0.01, 0.03, 0.06, 0.1, 5.0, 5.0]),
        killed=one_of([False, True]),
    )
    def somebody_collects(self, keep: int | None, dry: bool, within: float, killed: bool) -> None:
        self.do(lambda world: world.collect(keep=keep, dry=dry, within=within, killed=killed))

    @may(STORE_RULES, seconds=one_of([16.0, 16.0, 32.0, 95.0]))
    def leases_end(self, seconds: float) -> None:
        self.do(lambda world: world.wait(seconds))

    @may(STORE_RULES, host=STORE_HOST, slow=one_of([1.0, 4.0, 12.0]), steps=one_of([2, 4, 6]), noted=DELTA)
    def version_is_collected_that_a_slow_follower_pulls(self, host: int, slow: float, steps: int, noted: bool) -> None:
        if not noted:
            self.do(lambda world: world.goes_wrong(world.host(host).name, StoreCall.WRITE, [StoreFault.FAILS] * 4))
        self.do(lambda world: world.slow(world.host(host).name, slow))
        for _ in range(steps):
            self.do(lambda world: world.publish_to_store(0, delta=False, within=5.0), then=12.0)
            self.do(lambda world: world.collect(keep=1, within=5.0))
        self.do(lambda world: world.slow(world.host(host).name, 0.0))

    @may(STORE_RULES, who=WHO, slow=one_of([0.0, 0.1, 1.0]))
    def way_to_the_store_is_slow(self, who: str, slow: float) -> None:
        self.do(lambda world: world.slow(who, slow))

    @may(STORE_RULES, host=STORE_HOST, days=one_of([-400.0, -1.0, 0.0, 1.0]))
    def follower_of_the_store_has_another_clock(self, host: int, days: float) -> None:
        self.do(lambda world: world.host(host).set_wall_clock(days))

    @may(STORE_RULES, host=STORE_HOST, kind=one_of(DISK_FAULTS), seconds=one_of([0.5, 9.0, 40.0]))
    def disk_beside_the_store_fails_for_a_while(self, host: int, kind: str, seconds: float) -> None:
        self.do(lambda world: world.host(host).disk_fault(kind))
        self.do(lambda world: world.publish_to_store(0, delta=False, within=5.0), then=seconds)
        self.do(lambda world: world.host(host).heal_disk())

    @may(STORE_RULES, host=STORE_HOST, name=STORE_ENGINE, starts=one_of([False, True]))
    def engine_beside_the_store_is_killed(self, host: int, name: str, starts: bool) -> None:
        self.do(lambda world: world.host(host).stop_engine(name, starts=starts))

    @may(STORE_RULES, host=STORE_HOST, name=STORE_ENGINE, call=one_of(CALLS), fault=one_of(Fault))
    def call_beside_the_store_goes_wrong(self, host: int, name: str, call: Call, fault: Fault) -> None:
        self.do(lambda world: world.host(host).goes_wrong(name, call, fault))

    @may(STORE_RULES, host=STORE_HOST)
    def follower_of_the_store_sweeps(self, host: int) -> None:
        self.do(lambda world: world.host(host).sweep())
