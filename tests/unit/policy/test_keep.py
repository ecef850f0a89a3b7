"""What stays and what goes: the rules one by one, and the promises for any mixture of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd.policy.holdings import Weight
from refitd.policy.keep import KeepRules, KeepVerdict, keep
from refitd.policy.leases import Lease, LeaseKind
from refitd.root.scan import FoundFolder, Listing, ListingFailed
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import Kind, VersionState

SEALED, UNKNOWN, REJECTED, LOST, RETIRED = (
    VersionState.SEALED,
    VersionState.UNKNOWN,
    VersionState.REJECTED,
    VersionState.LOST,
    VersionState.RETIRED,
)
OPEN = (VersionState.ANNOUNCED, VersionState.SETTLING, VersionState.VALIDATING, VersionState.UNKNOWN)
LISTED = Listing((FoundFolder(run="exp", order=Order(1, 1), path="exp/v000001"),), frozenset({"exp"}))
DAY = 86400.0


def version(step: int, state: VersionState = SEALED, *, generation: int = 1, run: str = "exp", **fields: object):  # noqa: ANN201
    order = Order(generation, step)
    record = VersionRecord(
        run=run, order=order, path=f"{run}/{version_folder(order)}", state=state, created_at=""
    ).having(bytes=10)
    return record.having(**fields)


def decide(
    versions: Sequence[VersionRecord],
    rules: KeepRules | None = None,
    *,
    leases: Mapping[str, Sequence[Lease]] | None = None,
    listing: Listing | ListingFailed = LISTED,
    ages: Mapping[str, float] | None = None,
) -> list[KeepVerdict]:
    return keep(versions, leases or {}, rules or KeepRules(), listing=listing, ages=ages or {})


def kept_steps(verdicts: Sequence[KeepVerdict]) -> list[int]:
    return sorted(verdict.record.order.step for verdict in verdicts if verdict.keep)


def lease(kind: LeaseKind = LeaseKind.SERVING) -> list[Lease]:
    return [Lease(kind=kind, holder="engine-0")]


def test_the_newest_good_versions_of_each_run_stay() -> None:
    versions = [version(step, run=run) for run in ("a", "b") for step in (1, 2, 3, 4)]
    verdicts = decide(versions, KeepRules(last=2))
    assert [(v.record.run, v.record.order.step) for v in verdicts if v.keep] == [("a", 3), ("a", 4), ("b", 3), ("b", 4)]
    assert verdicts[0].reasons == ("not one of the newest 2 good versions of run a, and it is not needed",)
    assert verdicts[3].reasons == ("newest good version of run a", "one of the newest 2 good versions of run a")


def test_of_a_run_that_is_closed_the_newest_good_version_stays_and_every_nth() -> None:
    versions = [version(step, run=run) for run in ("a", "b") for step in (1, 2, 3, 4, 5)]
    versions[3] = versions[3].having(served_at="t")
    versions[4] = versions[4].having(served_at="t")
    verdicts = keep(versions, {}, KeepRules(last=3, every=2), listing=LISTED, ages={}, closed={"a"})
    kept = [(v.record.run, v.record.order.step) for v in verdicts if v.keep]
    assert kept == [("a", 2), ("a", 4), ("a", 5), ("b", 2), ("b", 3), ("b", 4), ("b", 5)]
    assert verdicts[0].reasons == ("run a is closed, and it is not needed",)


def closed_beside_an_open_run(budget: int, **more: object) -> list[str]:
    versions = [version(step, run=run) for run in ("a", "b") for step in (1, 2)]
    rules = KeepRules(last=2, disk_budget=budget)
    verdicts = keep(versions, {}, rules, listing=LISTED, ages={}, closed={"a"}, **more)  # type: ignore[arg-type]
    return [v.record.id for v in verdicts if v.keep]


def test_the_disk_budget_takes_the_last_version_of_a_closed_run_after_what_it_takes_of_open_runs() -> None:
    assert closed_beside_an_open_run(30) == ["a~v000002", "b~v000001", "b~v000002"]
    assert closed_beside_an_open_run(20) == ["a~v000002", "b~v000002"]
    assert closed_beside_an_open_run(10) == ["b~v000002"]


def test_the_disk_budget_takes_nothing_that_engines_follow_or_that_has_a_lease_or_a_pin() -> None:
    assert closed_beside_an_open_run(10, followed={"a"}) == ["a~v000002", "b~v000002"]
    rules, only = KeepRules(disk_budget=1), [version(1)]
    assert kept_steps(keep(only, {only[0].id: lease()}, rules, listing=LISTED, ages={}, closed={"exp"})) == [1]
    pinned = [version(1, pinned=True)]
    assert kept_steps(keep(pinned, {}, rules, listing=LISTED, ages={}, closed={"exp"})) == [1]
    (verdict,) = keep(only, {}, rules, listing=LISTED, ages={}, closed={"exp"})
    assert verdict.reasons == (
        "given up for the disk budget of 1 bytes; it was kept because: newest good version of run exp, which is closed",
    )


def test_an_empty_root_is_no_doubt_where_all_that_is_known_is_retired() -> None:
    empty = Listing((), frozenset())
    assert kept_steps(decide([version(1, RETIRED)], listing=empty)) == []
    assert kept_steps(decide([version(1, RETIRED), version(2)], listing=empty)) == [1, 2]


def test_of_a_run_that_is_closed_versions_without_a_verdict_go_but_for_one_that_is_newer_than_all_good_ones() -> None:
    states = {1: UNKNOWN, 2: SEALED, 3: UNKNOWN, 4: UNKNOWN}
    versions = [version(step, state, run=run) for run in ("a", "b") for step, state in states.items()]
    there = Listing(tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in versions), frozenset({"a", "b"}))
    verdicts = keep(versions, {}, KeepRules(), listing=there, ages={}, closed={"a"})
    kept = [(v.record.run, v.record.order.step) for v in verdicts if v.keep]
    assert kept == [("a", 2), ("a", 4), ("b", 1), ("b", 2), ("b", 3), ("b", 4)]
    assert verdicts[0].reasons == ("run a is closed, and it is not needed",)
    assert verdicts[3].reasons == ("UNKNOWN: it has no verdict yet, and none of its run is newer",)
    assert kept_steps(keep(versions[:4], {}, KeepRules(), listing=LISTED, ages={}, closed={"a"})) == [2]  # no folders


def test_of_a_run_that_is_closed_a_version_without_a_verdict_stays_while_it_is_needed_or_may_be_anybodys() -> None:
    first, second, third, newest = (version(step, UNKNOWN) for step in (1, 2, 3, 4))
    versions = [first, second.having(pinned=True), third, newest]
    weights = {third.id: Weight(bytes=10, foreign=10, refusal="refitd may not delete it")}
    there = replace(LISTED, found=tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in versions))
    verdicts = keep(versions, {first.id: lease()}, KeepRules(), listing=there, ages={}, weights=weights, closed={"exp"})
    assert [verdict.reasons[0] for verdict in verdicts] == [
        "engine engine-0 serves it",
        "pinned",
        "refitd may not delete it",
        "UNKNOWN: it has no verdict yet, and none of its run is newer",
    ]


@pytest.mark.parametrize("state", OPEN)
def test_a_version_without_a_verdict_is_never_deleted(state: VersionState) -> None:
    versions = [version(1, state, bytes=1000), *(version(step) for step in range(2, 9))]
    verdict = decide(versions, KeepRules(last=1, disk_budget=0))[0]
    assert verdict.keep
    assert state.value in verdict.reasons[0]


@pytest.mark.parametrize("kind", list(LeaseKind))
@pytest.mark.parametrize("state", [SEALED, REJECTED, LOST, RETIRED])
def test_any_lease_keeps_any_version_whatever_the_budget(kind: LeaseKind, state: VersionState) -> None:
    held, newest = version(1, state), version(9)
    rules = KeepRules(last=1, disk_budget=0)
    verdict = decide([held, newest], rules, leases={held.id: lease(kind)}, ages={held.id: 9 * DAY})[0]
    assert verdict.keep
    assert verdict.reasons[0] == str(lease(kind)[0])
    assert not decide([held, newest], rules, ages={held.id: 9 * DAY})[0].keep


def test_the_newest_is_not_called_good_where_it_was_rolled_back_from() -> None:
    newest, _ = decide([version(2, barred=True), version(1)], KeepRules(last=1))
    assert newest.keep
    assert newest.reasons[0] == "newest version on disk of run exp, though it was rolled back from"


def test_what_engines_served_before_stays_however_many_came_after_it_that_none_served() -> None:
    """An engine is killed while it serves 26; when it is back, on 29, a rollback has somewhere to go."""
    versions = [version(step, served_at="t" if step in (25, 26, 29) else None) for step in range(25, 30)]
    verdicts = decide(versions)
    assert kept_steps(verdicts) == [26, 27, 28, 29]
    assert verdicts[1].reasons == ("engines of run exp served it before the current one: a rollback goes to it",)
    assert kept_steps(decide([*versions, version(30, served_at="t")])) == [28, 29, 30]
    assert kept_steps(decide(versions, KeepRules(last=1))) == [29], "who keeps one has nothing to go back to"


def test_what_a_rollback_goes_to_is_given_up_last_for_the_disk_budget() -> None:
    versions = [version(step, served_at="t" if step in (1, 4) else None) for step in (1, 2, 3, 4)]
    assert kept_steps(decide(versions, KeepRules(disk_budget=20))) == [1, 4]
    assert kept_steps(decide(versions, KeepRules(disk_budget=10))) == [4]


def test_what_was_rolled_back_from_is_none_of_the_newest() -> None:
    versions = [version(step, barred=step in (4, 5)) for step in range(1, 7)]
    verdicts = decide(versions)
    assert kept_steps(verdicts) == [2, 3, 6]
    assert verdicts[4].reasons == ("it was rolled back from, and it is not needed",)


def test_what_a_canary_refused_is_not_said_to_be_rolled_back_from() -> None:
    refused = {"barred": True, "given_up": "the canary 127.0.0.1:30001 failed its check: http://c says no"}
    (alone,) = decide([version(1, **refused)], KeepRules(last=1))
    newest = "newest version on disk of run exp, though the canary 127.0.0.1:30001 failed its check"
    assert (alone.keep, alone.reasons) == (True, (newest,))
    older = decide([version(1, **refused), version(2)], KeepRules(last=1))[0]
    assert older.reasons == ("the canary 127.0.0.1:30001 failed its check, and it is not needed",)


def test_a_pin_keeps() -> None:
    verdict, _ = decide([version(1, pinned=True), version(2)], KeepRules(last=1))
    assert verdict.keep
    assert verdict.reasons == ("pinned",)


@pytest.mark.parametrize("state", [REJECTED, LOST])
def test_evidence_stays_for_a_day(state: VersionState) -> None:
    bad = version(1, state)
    assert decide([bad, version(2)])[0].keep, "one whose age nobody knows is new"
    assert decide([bad, version(2)], ages={bad.id: DAY - 1})[0].keep
    verdict = decide([bad, version(2)], ages={bad.id: DAY})[0]
    assert not verdict.keep
    assert verdict.reasons == (f"{state} more than 24 h ago, and it is not needed",)


def test_after_a_restart_of_the_trainer_later_steps_of_the_old_generation_count_as_old() -> None:
    old = [version(step) for step in (4, 5, 6, 7, 8, 9, 10)]
    new = [version(step, generation=2) for step in (6, 7)]
    verdicts = decide(old + new, KeepRules(last=3, every=5))
    kept = [(v.record.order.generation, v.record.order.step) for v in verdicts if v.keep]
    assert kept == [(1, 5), (2, 6), (2, 7)]
    assert verdicts[6].reasons == ("run exp was restarted at or before step 10, and it is not needed",)


def test_a_new_generation_without_a_good_version_replaces_nothing() -> None:
    versions = [version(8), version(9), version(5, VersionState.VALIDATING, generation=2)]
    assert kept_steps(decide(versions, KeepRules(last=2))) == [5, 8, 9]


@pytest.mark.parametrize(
    "listing", [Listing((), frozenset()), Listing((), frozenset({"exp"})), ListingFailed("Input/output error")]
)
def test_an_empty_or_failed_listing_deletes_nothing(listing: Listing | ListingFailed) -> None:
    versions = [version(step, state) for step, state in enumerate([RETIRED, REJECTED, LOST, SEALED, SEALED])]
    verdicts = decide(versions, KeepRules(last=1, disk_budget=0), listing=listing, ages={v.id: 9e9 for v in versions})
    assert all(verdict.keep for verdict in verdicts)
    assert all("nothing is deleted" in verdict.reasons[0] for verdict in verdicts)


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/etc", "exp/../../etc", "exp//v000001", ".refitd/slots", "exp/v\0001", "exp/v000001/"]
)
def test_only_what_lies_under_the_root_is_ever_deleted(path: str) -> None:
    verdict, _ = decide([version(1, RETIRED, path=path), version(2)])
    assert verdict.keep
    assert "under the root" in verdict.reasons[0]


# Seven versions of 10 bytes: 10, 20 and 30 divide by ten, 28 to 31 are the last four, 15 is rejected.
BUDGETED = [version(10), version(15, REJECTED), version(20), version(28), version(29), version(30), version(31)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (None, [10, 15, 20, 28, 29, 30, 31]),
        (70, [10, 15, 20, 28, 29, 30, 31]),
        (69, [10, 20, 28, 29, 30, 31]),  # the evidence goes first, though it is the newest of its run
        (59, [20, 28, 29, 30, 31]),  # then the oldest of every ten
        (49, [28, 29, 30, 31]),
        (39, [29, 30, 31]),  # 30 is also one of the last four: now the oldest of these goes
        (29, [30, 31]),
        (0, [31]),  # the newest good one stays whatever it costs
    ],
)
def test_the_disk_budget_drops_the_least_worthy_first(budget: int | None, expected: list[int]) -> None:
    verdicts = decide(BUDGETED, KeepRules(last=4, every=10, disk_budget=budget))
    assert kept_steps(verdicts) == expected
    for verdict in verdicts:
        over = budget is not None and 10 * len(expected) > budget
        assert any("nothing else may go" in reason for reason in verdict.reasons) == (over and verdict.keep)
        assert verdict.keep or any("the disk budget of" in reason for reason in verdict.reasons)


def test_copies_take_of_the_disk_budget_and_what_is_over_it_says_so() -> None:
    rules = KeepRules(last=2, disk_budget=25)
    versions = [version(1), version(2)]
    assert kept_steps(keep(versions, {}, rules, listing=LISTED, ages={}, beside={"copies for deltas": 5})) == [1, 2]
    verdicts = keep(versions, {}, rules, listing=LISTED, ages={}, beside={"copies for deltas": 16})
    assert kept_steps(verdicts) == [2]
    over = "takes 26 bytes, copies for deltas 16 of them, over the disk budget of 25"
    assert over in verdicts[1].reasons[-1]


def test_under_the_budget_all_evidence_goes_before_anything_good_and_the_newest_of_each_run_last() -> None:
    versions = [version(1), version(2), version(3, REJECTED), version(4, REJECTED), version(1, LOST, run="other")]
    for budget, expected in ((49, [1, 1, 2, 4]), (39, [1, 2, 4]), (29, [1, 2]), (19, [2])):
        assert kept_steps(decide(versions, KeepRules(last=2, disk_budget=budget))) == expected


@pytest.mark.parametrize("state", [VersionState.ANNOUNCED, VersionState.SETTLING, VersionState.VALIDATING])
def test_a_version_without_a_verdict_costs_no_run_what_a_rollback_goes_to(state: VersionState) -> None:
    """2 is what a rollback goes to, 5 was rejected, 6 is served, and 7 has just come."""
    good = [version(2, served_at="t"), version(6, served_at="t")]
    versions = [*good, version(5, REJECTED), version(7, state)]
    assert kept_steps(decide(versions, KeepRules(disk_budget=39))) == [2, 6, 7], "the rejected one goes first"
    assert kept_steps(decide(versions, KeepRules(disk_budget=29))) == [2, 6, 7], "it may be bad, and go itself"
    assert kept_steps(decide([*good, version(7, REJECTED)], KeepRules(disk_budget=29))) == [2, 6]
    newer = [*good, version(7, served_at="t")]
    assert kept_steps(decide(newer, KeepRules(disk_budget=29))) == [6, 7]
    elsewhere = [*good, version(7, state, run="other")]
    assert kept_steps(decide(elsewhere, KeepRules(disk_budget=29))) == [6, 7], "it is of another run"


@pytest.mark.parametrize("state", OPEN)
def test_a_version_without_a_verdict_of_any_run_costs_a_run_that_engines_follow_no_rollback(
    state: VersionState,
) -> None:
    """2 is what a rollback goes to, 6 is served; the other run has no verdicts."""
    good = [version(2, served_at="t"), version(6, served_at="t")]
    versions = [*good, version(7, state, run="other"), version(8, state, run="other")]

    def kept(budget: int, *followed: str) -> list[int]:
        rules = KeepRules(last=2, disk_budget=budget)
        return kept_steps(keep(versions, {}, rules, listing=LISTED, ages={}, followed=followed))

    assert kept(40, "exp") == kept(29, "exp") == kept(20, "exp") == [2, 6, 7, 8]
    assert kept(19, "exp") == [6, 7, 8], "good versions alone do not fit"
    assert kept(39) == kept(39, "other") == [6, 7, 8], "no engine follows the run"


def test_what_a_rollback_of_a_run_that_no_engine_follows_goes_to_goes_first() -> None:
    """The followed run's is the older one."""
    versions = [version(step, run=run, served_at="t") for step, run in ((1, "a"), (2, "a"), (3, "b"), (4, "b"))]
    rules = KeepRules(last=2, disk_budget=30)
    assert kept_steps(keep(versions, {}, rules, listing=LISTED, ages={}, followed={"a"})) == [1, 2, 4]
    assert kept_steps(keep(versions, {}, rules, listing=LISTED, ages={}, followed={"a", "b"})) == [2, 3, 4]


def test_of_evidence_that_the_budget_takes_one_short_sentence_says_so() -> None:
    versions = [version(1, REJECTED), version(2, LOST), version(3)]
    verdicts = decide(versions, KeepRules(disk_budget=10))
    assert verdicts[0].reasons == ("evidence: the disk budget of 10 bytes has no room for it",)
    assert verdicts[1].reasons == ("evidence: the disk budget of 10 bytes has no room for it",)


def test_the_budget_is_named_once_with_all_that_a_version_was_kept_for() -> None:
    versions = [version(step, served_at="t" if step in (2, 3) else None) for step in (2, 3)]
    given_up = decide(versions, KeepRules(last=2, disk_budget=10))[0]
    assert given_up.reasons == (
        "given up for the disk budget of 10 bytes; it was kept because: engines of run exp served it before the "
        "current one: a rollback goes to it; and because: one of the newest 2 good versions of run exp",
    )


def test_evidence_is_promised_no_time_that_a_disk_budget_may_cut_short() -> None:
    versions = [version(1, REJECTED), version(2)]
    assert decide(versions, KeepRules(disk_budget=20))[0].reasons == (
        "it is evidence of why it was REJECTED, and stays for another 24 h unless the disk budget wants it",
    )
    assert decide(versions)[0].reasons == ("it is evidence of why it was REJECTED, and stays for another 24 h",)


@pytest.mark.parametrize("name", ["exp~v000001", "v000001"])
def test_the_base_of_a_kept_delta_stays_with_it(name: str) -> None:
    versions = [version(1), version(2), version(3, kind=Kind.DELTA, base=name)]
    verdicts = decide(versions, KeepRules(last=1))
    assert kept_steps(verdicts) == [1, 3]
    assert verdicts[0].reasons == ("base of exp~v000003, which is kept",)


def test_a_base_stays_with_a_retired_delta_that_an_engine_still_reads() -> None:
    """A kill between RETIRED and the deletion leaves it so, and an engine may come back that serves it."""
    versions = [version(1), version(2), version(3, RETIRED, kind=Kind.DELTA, base="v000001")]
    assert kept_steps(decide(versions, KeepRules(last=1), leases={versions[2].id: lease()})) == [1, 2, 3]
    assert kept_steps(decide(versions, KeepRules(last=1))) == [2]


@pytest.mark.parametrize("state", [REJECTED, LOST])
def test_a_delta_that_is_never_carried_out_keeps_no_base(state: VersionState) -> None:
    versions = [version(1), version(2), version(3, state, kind=Kind.DELTA, base="v000001")]
    assert kept_steps(decide(versions, KeepRules(last=1))) == [2, 3]


@pytest.mark.parametrize("path", ["exp/step_1", "exp/step_1/actor", "exp"])
def test_a_folder_that_overlaps_with_a_kept_version_stays(path: str) -> None:
    """A trainer rewrote a path after it was sealed: the LOST version and the new one share the folder."""
    lost, fresh = version(1, LOST, path=path), version(1, generation=2, path="exp/step_1")
    verdicts = decide([lost, fresh], ages={lost.id: 9 * DAY})
    assert verdicts[0].keep
    assert verdicts[0].reasons == ("its folder overlaps with that of exp~v000001.g2, which is kept",)
    assert not decide([replace(lost, path="exp/step_11"), fresh], ages={lost.id: 9 * DAY})[0].keep


RECORDS = st.lists(
    st.builds(
        version,
        st.integers(1, 12),
        st.sampled_from([state for state in VersionState if state is not VersionState.DELETED]),
        generation=st.integers(1, 3),
        run=st.sampled_from(["a", "b"]),
        pinned=st.booleans(),
        bytes=st.one_of(st.none(), st.integers(0, 50)),
        base=st.one_of(st.none(), st.integers(1, 12).map(lambda step: f"v{step:06d}")),
    ),
    max_size=25,
    unique_by=lambda record: record.id,
)
RULES = st.builds(
    KeepRules,
    last=st.integers(1, 5),
    every=st.integers(0, 4),
    disk_budget=st.one_of(st.none(), st.integers(0, 400)),
)


@settings(max_examples=150, deadline=None)
@given(versions=RECORDS, rules=RULES, data=st.data())
def test_nothing_that_anybody_needs_is_ever_dropped(
    versions: list[VersionRecord], rules: KeepRules, data: st.DataObject
) -> None:
    ids = sorted(record.id for record in versions)
    kinds = st.sampled_from(list(LeaseKind))
    leases = data.draw(st.dictionaries(st.sampled_from(ids), kinds.map(lease), max_size=5)) if ids else {}
    ages = dict(zip(ids, data.draw(st.lists(st.sampled_from([0.0, DAY]))), strict=False))
    verdicts = decide(versions, rules, leases=leases, ages=ages)

    assert [verdict.record for verdict in verdicts] == versions, "one verdict for each version, in order"
    assert all(verdict.reasons and all(verdict.reasons) for verdict in verdicts), "everything explains itself"
    kept = {verdict.record.id for verdict in verdicts if verdict.keep}
    for record in versions:
        newer = [other for other in versions if other.run == record.run and other.state is SEALED]
        is_newest = record.state is SEALED and record.order == max(other.order for other in newer)
        if record.id in leases or record.pinned or record.state in OPEN or is_newest:
            assert record.id in kept
        if record.id in kept and record.base is not None and record.state not in (REJECTED, LOST):
            bases = [
                other for other in versions if (other.run, version_folder(other.order)) == (record.run, record.base)
            ]
            assert all(base.id in kept for base in bases)

    again = decide([record for record in versions if record.id in kept], rules, leases=leases, ages=ages)
    assert all(verdict.keep for verdict in again), "a second sweep finds nothing more"


def test_a_trainer_s_own_folder_is_its_trainer_s_to_delete_unless_that_was_asked_for() -> None:
    versions = [version(step, path=f"exp/step_{step}") for step in (1, 2, 3)]
    there = Listing(tuple(FoundFolder(run="exp", order=v.order, path=v.path) for v in versions), frozenset({"exp"}))
    assert kept_steps(decide(versions, KeepRules(last=1), listing=there)) == [1, 2, 3]
    assert kept_steps(decide(versions, KeepRules(last=1, foreign=True), listing=there)) == [3]
    assert "--reclaim-foreign" in decide(versions, KeepRules(last=1), listing=there)[0].reasons[0]
    gone = replace(there, found=there.found[2:])  # its trainer has deleted the older ones: the books are closed
    assert kept_steps(decide(versions, KeepRules(last=1), listing=gone)) == [3]


def test_what_many_engines_serve_is_kept_for_one_reason() -> None:
    many = [Lease(kind=LeaseKind.SERVING, holder=f"e{number}") for number in range(30)]
    (verdict,) = keep([version(1)], {version(1).id: many}, KeepRules(), listing=LISTED, ages={})
    assert verdict.reasons[0] == "30 engines serve it: e0, e1, e2 and 27 more"
    assert sum("serve" in reason for reason in verdict.reasons) == 1
