"""What a copy is made from: the copy or the full version that the fewest deltas lead from."""

from dataclasses import replace
from typing import Any

from refitd.policy.chain import NoBase
from refitd.policy.materialize import Copy, MakeCopy, decide
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from support.records import version


def delta(step: int, base: int, **fields: Any) -> VersionRecord:
    return version(step, kind=Kind.DELTA, base=f"run~v{base:06d}", **fields)


CHAIN = [version(1), delta(2, 1), delta(3, 2), delta(4, 3), delta(5, 4)]


def copy(step: int) -> Copy:
    return Copy(
        run="run", name=f"v{step:06d}", path=f"copies/{step}", order=Order(1, step), digest="xxh3:", signature="s"
    )


def decided(*copies: Copy, versions: list[VersionRecord] = CHAIN, step: int = 5) -> Copy | MakeCopy | NoBase:
    known = {each.id: each for each in versions}
    return decide(known[f"run~v{step:06d}"], known, copies)


def steps(decision: Copy | MakeCopy | NoBase) -> list[int]:
    assert isinstance(decision, MakeCopy)
    return [each.order.step for each in decision.deltas]


def test_without_a_copy_one_is_made_from_the_full_version_and_all_deltas_on_it() -> None:
    found = decided()
    assert isinstance(found, MakeCopy)
    assert (found.source, found.target, steps(found)) == (CHAIN[0], CHAIN[4], [2, 3, 4, 5])
    assert found.needs == {f"run~v{step:06d}" for step in range(1, 6)}


def test_it_is_made_from_the_copy_that_the_fewest_deltas_lead_from() -> None:
    newest = copy(4)
    found = decided(copy(3), newest, copy(2))
    assert isinstance(found, MakeCopy)
    assert (found.source, steps(found)) == (newest, [5])
    assert found.needs == {"run~v000005"}


def test_a_copy_that_is_there_is_used_as_it_is() -> None:
    there = copy(5)
    assert decided(copy(4), there) == there


def test_a_delta_leads_from_every_version_since_its_base() -> None:
    """Engines were at 2 when 4 and 5 were published: each lists all that changed since then."""
    chain = [version(1), delta(2, 1), delta(3, 2), delta(4, 2), delta(5, 2)]
    assert steps(decided(copy(3), versions=chain)) == [5]
    assert steps(decided(copy(1), versions=chain)) == [2, 5]


def test_nothing_is_made_from_a_copy_that_nothing_leads_from_or_that_nobody_believes() -> None:
    """It holds a version of another generation, or one that is newer, or is worthless."""
    for other in (replace(copy(3), order=Order(2, 3)), copy(6), copy(4).doubted(), copy(5).doubted()):
        found = decided(other)
        assert isinstance(found, MakeCopy)
        assert found.source is CHAIN[0]


def test_a_base_that_is_gone_is_no_matter_to_a_copy_that_is_further() -> None:
    assert steps(decided(copy(3), versions=CHAIN[3:])) == [4, 5]


def test_a_base_that_is_gone_makes_it_hopeless_where_no_copy_helps() -> None:
    found = decided(versions=CHAIN[1:])
    assert isinstance(found, NoBase)
    assert found.final
    assert "its base run~v000001 has not been seen" not in found.reason


def test_a_base_without_a_verdict_is_waited_for() -> None:
    found = decided(versions=[version(1, state=VersionState.VALIDATING), delta(5, 1)])
    assert isinstance(found, NoBase)
    assert not found.final
    assert "it has no verdict yet" in found.reason


def test_a_base_that_is_lost_makes_it_hopeless_and_says_which() -> None:
    lost = [version(1, state=VersionState.LOST, reason="gone"), *CHAIN[1:]]
    found = decided(versions=lost)
    assert isinstance(found, NoBase)
    assert found.final
    assert "run~v000001 is LOST (gone)" in found.reason
