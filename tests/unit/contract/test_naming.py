"""Names of runs and versions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.contract.naming import (
    InvalidNameError,
    Order,
    check_run,
    label_of,
    parse_version_folder,
    parse_version_id,
    parse_version_label,
    version_folder,
    version_id,
    version_label,
    whole_step,
)

orders = st.builds(Order, generation=st.integers(1, 999), step=st.integers(0, 10**12))


@given(orders)
def test_a_version_folder_says_its_order(order: Order) -> None:
    assert parse_version_folder(version_folder(order)) == order


@given(orders)
def test_a_label_says_the_step_and_which_beginning_of_the_training_it_is_of(order: Order) -> None:
    assert parse_version_label(version_label(order)) == order
    assert version_label(order).isdigit() == (order.generation == 1)


@given(orders, st.from_regex(r"\A[A-Za-z0-9]{1,8}(/[A-Za-z0-9]{1,8}){0,2}\Z"))
def test_a_version_id_is_one_url_safe_word_and_says_what_it_names(order: Order, run: str) -> None:
    id_ = version_id(run, order)
    assert "/" not in id_
    assert parse_version_id(id_) == (run, order)
    assert label_of(id_) == version_label(order)


@pytest.mark.parametrize(
    ("name", "order"), [("v000123", Order(1, 123)), ("v000123.g2", Order(2, 123)), ("v1234567", Order(1, 1234567))]
)
def test_folders_are_named_as_documented(name: str, order: Order) -> None:
    assert parse_version_folder(name) == order


@pytest.mark.parametrize("name", ["v123", "v000123.g1", "v000123.g0", "v0001234", "V000123", "v000123x", ".incoming-x"])
def test_other_folders_are_not_versions(name: str) -> None:
    assert parse_version_folder(name) is None


@pytest.mark.parametrize(
    "run", ["", "/abs", "a/../b", ".hidden", "a//b", "a/v000001", "a b", "a~b", "x" * 201, "..", "a\n"]
)
def test_a_run_that_could_leave_its_folder_is_refused(run: str) -> None:
    with pytest.raises(InvalidNameError):
        check_run(run)


def test_a_step_that_is_no_integer_is_named() -> None:
    assert whole_step(np.int64(5)) == 5
    with pytest.raises(TypeError, match="step is '5': it is a whole number"):
        whole_step("5")  # type: ignore[arg-type]
