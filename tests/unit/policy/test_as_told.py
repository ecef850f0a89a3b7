"""What an upstream says about a version counts on each host, and what was allowed once stays allowed."""

from dataclasses import replace
from typing import Any

import pytest

from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.contract.naming import Order
from refitd_client.contract.states import VersionState
from refitd_hosts.follow.upstream import UpstreamVersion
from refitd_hosts.policy.pulls import all_as_told, as_told, why_not_good

ORDER = Order(1, 7)
TOLD = UpstreamVersion(id="run~v000007", run="run", order=ORDER, digest="xxh3:1")
KNOWN = VersionRecord(run="run", order=ORDER, path="run/v000007", state=VersionState.SEALED, created_at="now")


def _rejected(code: Code) -> VersionRecord:
    return KNOWN.having(state=VersionState.REJECTED, reason="tensor a is missing", code=code)


@pytest.mark.parametrize("allowed", [{"allow_missing": ("mtp.*",)}, {"allow_extra": True}])
def test_a_version_that_was_rejected_for_what_its_notice_allowed_is_judged_again(allowed: dict[str, Any]) -> None:
    again = as_told(_rejected(Code.MISSING_TENSOR), replace(TOLD, **allowed))
    assert (again.state, again.reason, again.verdict.code) == (VersionState.ANNOUNCED, None, None)
    assert [again.announced.may_lack, again.announced.allow_extra] == [
        allowed.get("allow_missing", ()),
        "allow_extra" in allowed,
    ]


def test_nothing_is_allowed_that_would_make_bad_bytes_good() -> None:
    assert as_told(_rejected(Code.NON_FINITE), replace(TOLD, allow_missing=("mtp.*",))).state is VersionState.REJECTED


def test_a_verdict_stays_while_the_upstream_says_nothing_new() -> None:
    rejected = _rejected(Code.MISSING_TENSOR).having(may_lack=("mtp.*",))
    assert as_told(rejected, replace(TOLD, allow_missing=("mtp.*",))) == rejected


def test_an_upstream_of_an_earlier_release_takes_back_nothing_that_was_allowed() -> None:
    assert as_told(KNOWN.having(may_lack=("mtp.*",)), TOLD).announced.may_lack


def test_pins_and_bars_are_the_upstreams() -> None:
    told = as_told(KNOWN.having(pinned=True), replace(TOLD, barred=True))
    assert (told.pinned, told.barred, told.state) == (False, True, VersionState.SEALED)


def test_what_this_host_has_given_up_stays_barred_though_the_upstream_goes_on_wanting_it() -> None:
    why = "the canary a failed the check"
    given_up = KNOWN.having(barred=True, reason=why, given_up=why)
    assert as_told(given_up, TOLD) == given_up
    lost = given_up.having(state=VersionState.LOST, reason="its files are gone")
    assert as_told(lost, TOLD) == lost
    assert as_told(given_up, replace(TOLD, barred=True)).career.given_up is None, (
        "what the upstream bars is the upstream's"
    )
    assert not as_told(KNOWN.having(barred=True), TOLD).barred


def test_why_a_wanted_version_is_not_served_here_is_said() -> None:
    why = why_not_good(_rejected(Code.MISSING_TENSOR))
    assert why is not None
    assert "run/v000007 on this host is REJECTED: tensor a is missing" in why
    assert why_not_good(KNOWN) is why_not_good(None) is None


def test_what_the_upstream_has_barred_is_barred_here_also_where_its_files_are_gone_there() -> None:
    gone, other = replace(KNOWN, order=Order(1, 6), path="run/v000006"), replace(KNOWN, order=Order(1, 5))
    known = {each.id: each for each in (KNOWN, gone, other)}
    told = all_as_told(known, [TOLD], [gone.id, "run~v000001"])
    assert told == [gone.having(barred=True)]
    assert all_as_told(known | {gone.id: told[0]}, [TOLD], [gone.id]) == []
