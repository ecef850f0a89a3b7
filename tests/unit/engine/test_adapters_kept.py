"""Which of an engine's adapters are unloaded, and in which order: a request may come late for those before the last."""

import pytest

from refitd.engine.adapters import ListedAdapter, superfluous


def unloaded(steps: list[int], served: int, keep: int) -> list[int]:
    listed = [ListedAdapter(f"actor-v{step}", str(step), f"/root/run/v{step:06d}") for step in steps]
    return [int(each.label) for each in superfluous(listed, str(served), keep)]


@pytest.mark.parametrize(
    ("steps", "served", "keep", "expected"),
    [
        ([7], 7, 1, []),
        ([6, 7], 7, 1, [6]),
        ([6, 7], 7, 2, []),
        ([10, 9, 11, 8], 11, 2, [8, 9]),  # the oldest first, by number and not by name
        ([1, 2, 3], 3, 5, []),
        ([5, 6, 7, 8], 6, 2, [8, 7]),  # rolled back from: nobody should get these
        ([3, 4, 5, 9], 5, 2, [9, 3]),  # and what a run has left that was begun again
    ],
)
def test_the_served_adapter_and_those_right_before_it_stay(
    steps: list[int], served: int, keep: int, expected: list[int]
) -> None:
    assert unloaded(steps, served, keep) == expected


def test_a_training_that_began_again_has_newer_adapters_though_its_steps_are_lower() -> None:
    listed = [ListedAdapter(f"actor-v{label}", label, "") for label in ("29", "31", "5.g2", "6.g2")]
    assert [each.label for each in superfluous(listed, "6.g2", 2)] == ["29", "31"]
    assert [each.label for each in superfluous(listed, "31", 2)] == ["6.g2", "5.g2"]


@pytest.mark.parametrize("keep", [1, 2, 3, 8])
def test_adapters_never_pile_up_and_the_served_one_is_never_unloaded(keep: int) -> None:
    loaded: list[int] = []
    for step in range(1, 40, 3):
        loaded.append(step)
        gone = unloaded(loaded, step, keep)
        assert step not in gone
        loaded = [each for each in loaded if each not in gone]
        assert len(loaded) <= keep
