"""Which copy is written, from what: never one that somebody may be reading, and by as few deltas as there are."""

from typing import Any

from refitd.policy.materialize import CopyReady, Decision, NoCopyPossible, Readers, WaitForCopy, WriteCopy, decide
from refitd.state.copy import Copy
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from support.records import version

READ = Readers(reads=("engine a serves it",), is_waited_for=True, holders=frozenset({"a"}), may_go=False)
READ_TOO = Readers(reads=("engine b serves it",), is_waited_for=True, holders=frozenset({"b"}), may_go=False)
OUT_OF_REACH = Readers(reads=("engine a serves it",), is_waited_for=False, may_go=False)
DEAD = Readers(reads=("engine a serves it",), is_waited_for=False, may_go=True)
FREE = Readers()


def delta(step: int, base: int, **fields: Any) -> VersionRecord:
    return version(step, kind=Kind.DELTA, base=f"run~v{base:06d}", **fields)


CHAIN = [version(1), delta(2, 1), delta(3, 2), delta(4, 3), delta(5, 4)]


def copy(name: str, step: int | None) -> Copy:
    return Copy(run="run", name=name, path=f"copies/{name}", order=None if step is None else Order(1, step))


def decided(
    *copies: tuple[Copy, Readers], versions: list[VersionRecord] = CHAIN, step: int = 5, **more: Any
) -> Decision:
    known = {each.id: each for each in versions}
    readers = {each.name: by for each, by in copies}
    return decide(known[f"run~v{step:06d}"], known, [each for each, _ in copies], readers, **({"most": 2} | more))


def steps(decision: Decision) -> list[int]:
    assert isinstance(decision, WriteCopy)
    return [each.order.step for each in decision.deltas]


def test_without_a_copy_one_is_made_from_the_full_version_and_all_deltas_on_it() -> None:
    found = decided()
    assert isinstance(found, WriteCopy)
    assert (found.source, found.into, steps(found)) == (CHAIN[0], None, [2, 3, 4, 5])
    assert found.needs == tuple(f"run~v{step:06d}" for step in range(1, 6))


def test_the_older_copy_is_patched_while_the_other_one_is_read() -> None:
    older = copy("a", 3)
    found = decided((older, FREE), (copy("b", 4), READ))
    assert isinstance(found, WriteCopy)
    assert (found.source, found.into, steps(found)) == (older, older, [4, 5])


def test_a_copy_that_somebody_reads_is_read_from_and_never_written() -> None:
    read = copy("b", 4)
    found = decided((read, READ))
    assert isinstance(found, WriteCopy)
    assert (found.source, found.into, steps(found)) == (read, None, [5])


def test_while_every_copy_is_read_it_is_waited_and_said_for_whom() -> None:
    found = decided((copy("a", 3), READ), (copy("b", 4), READ))
    assert isinstance(found, WaitForCopy)
    assert "copies/a: engine a serves it" in found.reason


def test_where_engines_stay_on_each_of_several_copies_one_more_is_written() -> None:
    """None of them would come free by itself: the engines would stay behind for ever."""
    copies = (copy("a", 3), READ), (copy("b", 4), READ_TOO)
    found = decided(*copies, stays=lambda _: True)
    assert isinstance(found, WriteCopy)
    assert (found.into, found.instead_of, steps(found)) == (None, None, [5])
    assert isinstance(decided(*copies, stays=lambda engine: engine == "a"), WaitForCopy), "that of b comes free"
    assert isinstance(decided(*copies, (copy("c", 2), READ), stays=lambda _: True), WaitForCopy), (
        "one more, and no others"
    )


def test_a_run_that_may_have_one_copy_has_one() -> None:
    assert isinstance(decided((copy("a", 4), READ), most=1, stays=lambda _: True), WaitForCopy)


def test_a_copy_that_only_engines_out_of_reach_hold_is_not_written_but_holds_up_nobody() -> None:
    found = decided((copy("a", 3), OUT_OF_REACH), (copy("b", 4), READ))
    assert isinstance(found, WriteCopy)
    assert (found.into, found.instead_of) == (None, None)


def test_a_copy_of_a_dead_engine_makes_room_for_another() -> None:
    dead = copy("a", 3)
    found = decided((dead, DEAD), (copy("b", 4), READ))
    assert isinstance(found, WriteCopy)
    assert (found.into, found.instead_of) == (None, dead)


def test_a_copy_that_holds_it_is_used_as_it_is() -> None:
    there = copy("a", 5)
    assert decided((there, READ), (copy("b", 4), FREE)) == CopyReady(there)


def test_a_delta_leads_from_every_version_since_its_base() -> None:
    """Engines were at 2 when 4 and 5 were published: each lists all that changed since then."""
    chain = [version(1), delta(2, 1), delta(3, 2), delta(4, 2), delta(5, 2)]
    assert steps(decided((copy("a", 3), FREE), (copy("b", 2), READ), versions=chain)) == [5]
    assert steps(decided((copy("a", 1), FREE), (copy("b", 2), READ), versions=chain)) == [2, 5]


def test_a_copy_that_nothing_leads_from_is_written_from_another() -> None:
    """It holds a version of another generation, or one that is newer, or nothing."""
    other = Copy(run="run", name="a", path="copies/a", order=Order(2, 3))
    for old in (other, copy("a", 6), copy("a", None)):
        read = copy("b", 4)
        found = decided((old, FREE), (read, READ))
        assert isinstance(found, WriteCopy)
        assert (found.source, found.into, steps(found)) == (read, old, [5])


def test_the_copy_of_the_last_good_version_is_written_last() -> None:
    """And what is free besides is written from it."""
    good, other = copy("a", 4), copy("b", None)
    found = decided((good, FREE), (other, FREE), last_good="run~v000004")
    assert isinstance(found, WriteCopy)
    assert (found.source, found.into) == (good, other)
    alone = decided((good, FREE), (copy("b", 3), READ), last_good="run~v000004")
    assert isinstance(alone, WriteCopy)
    assert alone.into == good


def test_a_base_that_is_gone_is_no_matter_to_a_copy_that_is_further() -> None:
    assert steps(decided((copy("a", 3), FREE), versions=CHAIN[3:])) == [4, 5]


def test_a_base_that_is_gone_makes_it_hopeless_where_no_copy_helps() -> None:
    found = decided((copy("a", None), FREE), versions=CHAIN[1:])
    assert isinstance(found, NoCopyPossible)
    assert "its base run~v000001 has not been seen" not in found.reason


def test_a_base_that_is_lost_makes_it_hopeless_and_says_which() -> None:
    lost = [version(1, state=VersionState.LOST, reason="gone"), *CHAIN[1:]]
    found = decided(versions=lost)
    assert isinstance(found, NoCopyPossible)
    assert "run~v000001 is LOST (gone)" in found.reason


def test_what_did_not_lead_there_is_not_tried_again() -> None:
    start = copy("a", 4)
    found = decided((start, FREE), misfits={"run~v000004"})
    assert isinstance(found, WriteCopy)
    assert (found.source, found.into) == (CHAIN[0], start)
    assert isinstance(decided((start, FREE), misfits={"run~v000004", "run~v000001"}), NoCopyPossible)
