"""Where a host goes while its upstream has paused the run."""

import pytest

from refitd_hosts.policy.pulls import is_held_back


@pytest.mark.parametrize(
    ("desired", "before"),
    [
        ("run~v000005", "run~v000004"),
        ("run~v000001.g2", "run~v000004"),
        ("run~v000004", None),  # it has just come: the engines that are there have not got the version either
        ("no version", "run~v000004"),
    ],
)
def test_a_host_goes_to_nothing_newer_while_its_upstream_has_paused_the_run(desired: str, before: str | None) -> None:
    assert is_held_back(desired, before)


def test_a_host_goes_back_while_its_upstream_has_paused_the_run_and_stays_on_what_it_has() -> None:
    assert not is_held_back("run~v000003", "run~v000004")
    assert not is_held_back("run~v000004", "run~v000004")
