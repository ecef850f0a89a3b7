"""Cases that chance has found, as short as they were made: each was a promise that did not hold."""

from contextlib import closing

from refitd.policy.strategy import StrategyName
from simulation.disk import Make
from simulation.fault import Call, Fault
from simulation.forgetting import ForgettingHosts
from simulation.forgetting_steps import ForgettingStory
from simulation.host_steps import HostStory
from simulation.hosts import Hosts
from simulation.led_hosts import LedHosts
from simulation.led_steps import LedStory
from simulation.links import Damage
from simulation.offer import Sending
from simulation.steps import Story
from simulation.store_steps import StoreStory
from simulation.store_world import StoreWorld
from simulation.world import World


def test_engines_that_come_to_rest_on_different_copies_are_all_brought_to_the_target() -> None:
    """Two stock engines serve the copies of two deltas, and the newer one loses its files. When there were two copies,
    neither came free: the next delta was never written into one.
    """
    with closing(World(18789976, strategy=StrategyName.CANARY)) as world:
        story = Story(world)
        story.loads_fail(faults=[Fault.UNFLUSHED, Fault.REFUSES], hands_over=True, name="a", seconds=0.2)
        story.engine_is_added_or_removed(named=True, seconds=0.0)
        story.loads_fail(
            faults=[Fault.UNFLUSHED, Fault.REFUSES, Fault.UNFLUSHED], hands_over=False, name="b", seconds=2.0
        )
        story.engine_is_killed(name="b")
        story.service_is_killed_and_started_again(seconds=0.0)
        story.path_is_rewritten(index=23, make=Make.MISSING)
        story.loads_fail(faults=[Fault.UNCLEAR], hands_over=False, name="a", seconds=0.2)
        story.publish_a_delta(announce=False, back=4, honest=True, seconds=0.0)
        world.heal()


def test_an_engine_that_slept_when_it_was_to_be_resumed_and_was_named_no_more_is_resumed_by_its_operator() -> None:
    """A vLLM goes to sleep in its update, and is taken out of the settings before it wakes: nobody knows any more who
    has paused it, and one that may be asleep is left alone.
    """
    with closing(World(30318339, strategy=StrategyName.ALL, vllm="ac")) as world:
        story = Story(world)
        story.publish(make=Make.NAN, announce=True, seconds=2.0)
        story.engine_is_added_or_removed(named=True, seconds=0.1)
        story.hand_over(seconds=0.05)
        story.engine_sleeps_for_a_while(name="c", seconds=20.0)
        story.engine_is_added_or_removed(named=False, seconds=0.0)
        story.engine_is_added_or_removed(named=True, seconds=0.0)
        world.heal()


def test_an_engine_whose_load_was_cut_off_with_its_record_goes_back_where_its_delta_cannot_be_loaded_again() -> None:
    """The journal is full, so that nothing says that a delta was loaded; its base goes, and the service is killed: what
    the engine holds is unknown, and from nothing no way leads to the delta.
    """
    with closing(World(2264370740, strategy=StrategyName.CANARY, vllm="abc")) as world:
        story = Story(world)
        story.publish_a_delta(back=4, announce=True, honest=True, seconds=0.01)
        story.publish(make=Make.NAN, announce=True, seconds=0.0)
        story.trainer_deletes_a_version(index=3)
        story.another_writer_loads_into_an_engine(name="b", seconds=3.0, times=1)
        story.engine_is_killed(name="a")
        story.engine_is_added_or_removed(named=False, seconds=2.0)
        story.label_is_set_by_someone_else(name="b")
        story.disk_fails_for_a_while(kind="full", seconds=9.0)
        story.call_of_someone_else_fails(name="a", loads=True, seconds=40.0)
        story.train_on(steps=5, seconds=0.1)
        story.trainer_deletes_a_version(index=3)
        story.disk_fails_for_a_while(kind="full", seconds=9.0)
        story.service_is_killed_and_started_again(seconds=0.0)
        world.heal()


def test_a_manifest_that_was_damaged_where_its_digest_does_not_look_is_pulled_again() -> None:
    """The link changes a byte among its fingerprints. The files' digests are right, so the version was taken with it,
    and every delta on it would have been refused on that host.
    """
    with closing(Hosts(5, strategy=StrategyName.ALL, vllm="", followers=1)) as world:
        story = HostStory(world)
        story.link_is_damaged(host=0, parts=[Damage.WRONG], answers=[], delta=False, seconds=5.0)
        world.heal()


def test_engines_of_a_host_that_is_ordered_back_to_a_delta_get_a_copy_of_it_and_its_proof_is_not_of_other_things() -> (
    None
):
    """They serve a newer full version that the hub has deleted since, so no copy was written. The vLLM of another host
    proves the delta by a digest, and this one by answers.
    """
    with closing(LedHosts(462542622, strategy=StrategyName.ALL, vllm="b", followers=3)) as world:
        story = LedStory(world)
        story.somebody_is_killed_in_a_pull(host=1, after=0.02, hub=False, delta=False)
        story.disk_of_a_follower_fails_for_a_while(host=3, kind="no room", seconds=9.0)
        story.host_is_cut_off_for_a_while(host=0, after=0.02, seconds=12.0)
        story.hub_pauses_updates_or_lets_them_go_on(paused=False, seconds=0.0)
        story.orders_are_lost_or_not_answered_or_come_late(
            host=0, orders=[Damage.SLOW, Damage.LOST, Damage.LOST, Damage.SLOW], others=[], delta=False
        )
        story.roll_back()
        world.heal()


def test_a_vllm_whose_load_broke_off_is_loaded_twice_before_it_computes() -> None:
    """What the first load after one that failed leaves behind may be a mixture, which vLLM itself does not say."""
    with closing(World(3184730022, strategy=StrategyName.ALL, vllm="abc")) as world:
        story = Story(world)
        story.call_of_someone_else_fails(name="a", loads=True, seconds=40.0)
        story.call_of_someone_else_fails(name="b", loads=True, seconds=40.0)
        world.heal()


def test_an_engine_that_is_to_be_loaded_again_holds_no_update_of_a_delta_whose_chain_is_gone() -> None:
    """It serves the delta, so it seemed to need no copy of it, and none was tried and refused: the update never ended,
    and the newer full version waited for that.
    """
    with closing(World(64673635, strategy=StrategyName.ROLLING, vllm="bc")) as world:
        story = Story(world)
        story.send(sending=Sending.OTHER, files=True, seconds=0.5)
        story.engine_is_added_or_removed(named=True, seconds=0.0)
        story.train_on(steps=4, seconds=0.5)
        story.path_is_rewritten(index=24, make=Make.MISSING)
        story.send(sending=Sending.BREAKS, files=True, seconds=40.0)
        story.resync(name="c")
        world.heal()


def test_a_hub_that_pushes_two_versions_before_it_says_what_is_wanted_does_not_send_followers_on_and_back() -> None:
    """Its own engines are still at the first one, so the hub wanted that; the pointer had wanted the second before."""
    with closing(StoreWorld(1, strategy=StrategyName.CANARY, followers=1, pushed=True)) as world:
        story = StoreStory(world)
        story.trainer_is_killed_in_an_upload(trainer=0, delta=True, after=0.08, back=0, swept=False)
        story.trainer_publishes(trainer=0, delta=True, within=3.0)
        story.who_publishes_is_killed_and_comes_again(trainer=0, back=1, seconds=2.0)
        world.heal()


def test_what_was_retired_and_is_wanted_again_before_its_folder_is_deleted_is_deleted_and_pulled_again() -> None:
    """The host's journal is full, so that it deletes nothing; then the hub rolls back to the version. The host kept the
    folder for it, could load nothing from it, and could not pull it into its place.
    """
    with closing(ForgettingHosts(476765477, strategy=StrategyName.CANARY, vllm="ac", followers=2)) as world:
        story = ForgettingStory(world)
        story.trainer_restarts_and_reuses_steps()
        story.publish(make=Make.GOOD, announce=False, seconds=2.0)
        story.hub_loses_its_disk(emptied=True, trainer="begins first", seconds=0.5, delta=False)
        story.hub_is_copied_and_goes_on(steps=2, seconds=20.0)
        story.disk_of_a_follower_fails_for_a_while(host=0, kind="full", seconds=9.0)
        story.roll_back()
        world.heal()


def test_a_hub_that_was_emptied_does_not_count_a_version_as_served_for_what_a_host_has_under_its_name() -> None:
    """The host had reported before the hub knew a version of that name."""
    with closing(LedHosts(1702502821, strategy=StrategyName.CANARY, vllm="a", followers=1)) as world:
        story = LedStory(world)
        story.hub_loses_its_disk(emptied=False, trainer="begins then", seconds=0.5, delta=False)
        story.hub_loses_its_disk(emptied=True, trainer="begins first", seconds=20.0, delta=True)
        world.heal()


def test_a_host_with_other_contents_under_the_name_of_a_deltas_base_says_so_and_goes_on_when_its_operator_acts() -> (
    None
):
    """It serves the base's name, so it can neither pull the base nor carry the delta out. It said "tried again later",
    and nobody knew what would help.
    """
    with closing(ForgettingHosts(3, strategy=StrategyName.ALL, followers=1)) as world:
        story = ForgettingStory(world)
        story.publish(make=Make.GOOD, announce=True, seconds=5.0)
        story.publish(make=Make.GOOD, announce=True, seconds=5.0)
        story.hub_loses_its_disk(emptied=True, trainer="begins first", seconds=5.0, delta=False)
        story.publish(make=Make.GOOD, announce=True, seconds=3.0)
        story.publish_a_delta(back=0, announce=True, honest=True, seconds=3.0)
        world.heal()


def test_an_engine_of_a_host_stays_at_what_it_serves_when_the_hub_bars_what_is_newer() -> None:
    """Only one engine of the host served it, so the host went back to what all of its engines had served."""
    with closing(ForgettingHosts(3017387484, strategy=StrategyName.ROLLING, vllm="abc", followers=1)) as world:
        story = ForgettingStory(world)
        story.somebody_is_killed_in_a_pull(host=1, after=0.05, hub=False, delta=True)
        story.somebody_is_killed_in_a_pull(host=3, after=0.3, hub=False, delta=False)
        story.hub_loses_its_disk(emptied=False, trainer="begins then", seconds=0.5, delta=False)
        story.hub_loses_its_disk(emptied=False, trainer="begins first", seconds=0.0, delta=True)
        story.call_of_a_follower_goes_wrong(host=0, name="b", call=Call.LOAD, fault=Fault.UNFLUSHED)
        story.hub_loses_its_disk(emptied=True, trainer="begins then", seconds=3.0, delta=False)
        story.hub_collects_what_a_follower_pulls(host=0, slow=8.0, steps=4)
        story.somebody_is_killed_in_a_pull(host=3, after=1.0, hub=False, delta=False)
        story.roll_back()
        world.heal()


def test_the_only_engine_of_its_kind_that_has_lied_about_a_version_serves_the_next_one() -> None:
    """Its own record refutes each clean load of the version. When it was restarted it was repaired with that version
    again, as the one on record, and the others waited for it in turns.
    """
    with closing(World(1495276456, strategy=StrategyName.ROLLING, vllm="abc")) as world:
        story = Story(world)
        story.witness_lies(name="b", seconds=20.0)
        story.resync(name="b")
        world.heal()


def test_an_engine_that_is_to_be_loaded_again_is_not_taken_back_where_what_it_serves_cannot_be_loaded_again() -> None:
    """It has the plugin, and serves a delta of which the others find no copy, since there is no room. A resync took it
    back to what the others serve.
    """
    with closing(World(3627454845, strategy=StrategyName.ROLLING, vllm="ab")) as world:
        story = Story(world)
        story.train_on(steps=5, seconds=0.1)
        story.train_on(steps=3, seconds=0.1)
        story.disk_fails_for_a_while(kind="no room", seconds=0.5)
        story.resync(name="a")
        world.heal()


def test_an_engine_whose_answers_another_ones_lie_contradicts_serves_the_next_version() -> None:
    """Both are stock vLLMs of one kind. The first load of the version gave the lie, and answers of two engines are
    never equal, so the third one of another kind is no witness.
    """
    with closing(World(3227751145, strategy=StrategyName.CANARY, vllm="abc")) as world:
        story = Story(world)
        story.another_writer_loads_into_an_engine(name="a", seconds=3.0, times=6)
        story.engine_is_added_or_removed(named=True, seconds=0.1)
        story.witness_lies(name="b", seconds=3.0)
        world.heal()
