"""Where a notice says its version is."""

from pathlib import Path

import pytest

from refitd.catalog.intake import order_of, relative_path
from refitd.problem import ProblemError
from refitd_client.contract.naming import Order

ROOT = Path("/srv/weights")


@pytest.mark.parametrize("path", ["run/v000007", "/srv/weights/run/v000007", "run/./v000007", "run/x/../v000007"])
def test_a_path_may_be_absolute_or_relative_to_the_root(path: str) -> None:
    assert relative_path(path, ROOT) == "run/v000007"


@pytest.mark.parametrize("path", ["/etc", "../other", "run/../../other", "/srv/weights2/run/v000007", "a\0b"])
def test_a_path_outside_the_root_is_refused(path: str) -> None:
    with pytest.raises(ProblemError, match="not beneath the root"):
        relative_path(path, ROOT)


@pytest.mark.parametrize("path", [".", "/srv/weights", ".refitd/trash/x", "run/.incoming-abc"])
def test_a_directory_that_is_no_version_is_refused(path: str) -> None:
    with pytest.raises(ProblemError, match="no version's directory"):
        relative_path(path, ROOT)


def test_the_directory_says_which_generation_it_is() -> None:
    assert order_of("run/v000007.g2", "run", 7, 1) == Order(2, 7)


def test_a_directory_with_a_name_of_its_own_belongs_to_the_current_generation() -> None:
    assert order_of("run/checkpoint-7", "run", 7, 3) == Order(3, 7)


@pytest.mark.parametrize(("run", "step"), [("run", 8), ("other", 7)])
def test_the_directory_of_another_version_is_refused(run: str, step: int) -> None:
    with pytest.raises(ProblemError):
        order_of("run/v000007", run, step, 1)
