"""A trainer's own name of a version decides its step, or stands beside it."""

import pytest

from refitd_client.front import LabelRefusedError, step_of_label


@pytest.mark.parametrize(("newest", "step"), [(None, 1), (0, 1), (41, 42)])
def test_without_a_label_steps_are_counted_on(newest: int | None, step: int) -> None:
    assert step_of_label(None, newest) == step


@pytest.mark.parametrize("newest", [None, 41])
def test_a_whole_number_above_the_newest_is_the_step(newest: int | None) -> None:
    assert step_of_label("100", newest) == 100


@pytest.mark.parametrize("label", ["41", "40", "0"])
def test_a_number_that_is_not_above_the_newest_is_refused(label: str) -> None:
    with pytest.raises(LabelRefusedError, match="not above 41"):
        step_of_label(label, 41)


@pytest.mark.parametrize("label", ["policy-7", "-3", "1.5", "\N{ARABIC-INDIC DIGIT SEVEN}", "9" * 14])
def test_any_other_text_leaves_steps_counted_on(label: str) -> None:
    assert step_of_label(label, 41) == 42


def test_a_text_that_a_version_of_the_run_has_is_refused() -> None:
    with pytest.raises(LabelRefusedError, match="policy-7 already"):
        step_of_label("policy-7", 41, known={"policy-7"})


@pytest.mark.parametrize("label", ["", "x" * 201, "a\nb"])
def test_a_text_that_is_no_name_is_refused(label: str) -> None:
    with pytest.raises(LabelRefusedError, match="empty, longer than 200 characters or not printable"):
        step_of_label(label, None)
