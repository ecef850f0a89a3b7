"""Whether two versions fit, by the budget and by the disk."""

import pytest

from refitd.policy.lines import plan_of, too_small
from refitd_client.contract.wire import Reclaimable

KEPT = [Reclaimable(path="run/v000001", keep=True, reasons=["pinned"], bytes=10)]


@pytest.mark.parametrize(
    ("budget", "free", "fits"), [(None, 10, True), (None, 9, False), (20, 99, True), (19, 99, False), (99, 9, False)]
)
def test_two_of_the_largest_version_fit_or_it_is_said(budget: int | None, free: int, fits: bool) -> None:
    told = too_small(plan_of(KEPT, budget, done=True), 10, free)
    assert (told is None) is fits
    assert told is None or len(told) <= 240


def test_without_a_good_version_nothing_is_said() -> None:
    assert too_small(plan_of([], 1, done=True), 0, 0) is None
