"""Where a step goes: order is by (generation, step), and no name is ever used twice."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client import NameRefusedError, PublishError, StepConflictError, WeightPublisher
from refitd_client.contract.naming import Order
from refitd_client.publish.run_folder import decide, newest_in
from support import published

WEIGHTS = {"a": np.zeros(1, np.float32)}

orders = st.builds(Order, generation=st.integers(1, 5), step=st.integers(0, 50))


@given(step=st.integers(0, 60), found=st.none() | orders)
def test_a_first_step_is_newer_than_everything_found(step: int, found: Order | None) -> None:
    """Whatever was published before, and in the same generation only if it goes on."""
    placed = decide(step, found=found, own=None)
    assert isinstance(placed, Order)
    assert placed.step == step
    if found is not None:
        assert placed > found
        assert (placed.generation == found.generation) == (step > found.step)


@given(step=st.integers(0, 60), found=st.none() | orders, own=orders)
def test_a_later_step_stays_in_its_generation_or_conflicts(step: int, found: Order | None, own: Order) -> None:
    """A publisher never begins a generation half-way."""
    placed = decide(step, found=found, own=own)
    assert placed == (Order(own.generation, step) if step > own.step else None)


def _publish(root: Path, *steps: int) -> None:
    with WeightPublisher(root, "run") as publisher:
        for step in steps:
            publisher.publish(WEIGHTS, step=step)


def test_a_restart_that_reuses_step_numbers_begins_a_generation(tmp_path: Path) -> None:
    """The old generation's later steps are older than the new one's first."""
    _publish(tmp_path, 1, 2, 3)
    _publish(tmp_path, 2, 3)
    _publish(tmp_path, 3)
    run = tmp_path / "run"
    assert published.versions(run) == ["v000001", "v000002", "v000002.g2", "v000003", "v000003.g2", "v000003.g3"]
    assert {published.check(run / name).generation for name in published.versions(run)} == {1, 2, 3}


def test_a_generation_that_begins_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever only mistook the step hears of it at once, and the first publication of a run is nothing to hear of."""
    _publish(tmp_path, 19, 20)
    assert caplog.messages == []
    with WeightPublisher(tmp_path, "run") as publisher:
        begun = [publisher.publish(WEIGHTS, step=step).begun for step in (19, 20)]
    said = "step 19 is not above 20, the last of run run: this begins generation 2, which takes over"
    assert begun == [said, None]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]


def test_whether_a_step_would_begin_a_generation_can_be_asked_before(tmp_path: Path) -> None:
    _publish(tmp_path, 19, 20)
    with WeightPublisher(tmp_path, "run") as publisher:
        assert "this begins generation 2" in (publisher.begins(19) or "")
        assert publisher.begins(21) is None
    assert published.versions(tmp_path / "run") == ["v000019", "v000020"]


def test_a_link_that_is_called_like_a_version_is_none(tmp_path: Path) -> None:
    _publish(tmp_path, 1)
    (tmp_path / "run" / "v000060").symlink_to("/nowhere")
    _publish(tmp_path, 2)
    assert published.check(tmp_path / "run" / "v000002").generation == 1


def test_reclaimed_versions_still_count(tmp_path: Path) -> None:
    _publish(tmp_path, 1, 2)
    for name in published.versions(tmp_path / "run"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    _publish(tmp_path, 2)
    assert published.versions(tmp_path / "run") == ["v000002.g2"]


def test_versions_that_others_wrote_count(tmp_path: Path) -> None:
    (tmp_path / "run" / "v000009.g4").mkdir(parents=True)
    (tmp_path / "run" / "v9").mkdir()  # no version's name
    _publish(tmp_path, 9)
    assert published.versions(tmp_path / "run") == ["v000009.g4", "v000009.g5"]


def test_steps_out_of_order_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(WEIGHTS, step=5)
        for step in (5, 4):
            with pytest.raises(StepConflictError, match="open a new publisher"):
                publisher.publish(WEIGHTS, step=step)
        publisher.publish(WEIGHTS, step=6)
    assert published.versions(tmp_path / "run") == ["v000005", "v000006"]


def test_a_failed_first_step_does_not_use_up_a_generation(tmp_path: Path) -> None:
    _publish(tmp_path, 1)
    with WeightPublisher(tmp_path, "run") as publisher:
        with pytest.raises(PublishError):
            publisher.publish({}, step=2)
        publisher.publish(WEIGHTS, step=2)
    assert published.versions(tmp_path / "run") == ["v000001", "v000002"]


@pytest.mark.parametrize("step", [-1, 10**12 + 1])
def test_a_step_that_no_version_can_have_is_refused(tmp_path: Path, step: int) -> None:
    with WeightPublisher(tmp_path, "run") as publisher, pytest.raises(NameRefusedError, match=str(step)):
        publisher.publish(WEIGHTS, step=step)


def test_a_step_may_be_any_integer_and_nothing_else(tmp_path: Path) -> None:
    """numpy's and torch's count as well; a float does not."""
    with WeightPublisher(tmp_path, "run") as publisher:
        assert publisher.publish(WEIGHTS, step=np.int64(3)).step == 3  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError):
            publisher.publish(WEIGHTS, step=4.0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("run", ["", "../out", "/abs", ".hidden", "v000001", "a//b"])
def test_a_run_name_that_leaves_its_folder_is_refused(tmp_path: Path, run: str) -> None:
    with pytest.raises(NameRefusedError):
        WeightPublisher(tmp_path / "root", run)
    assert not (tmp_path / "root").exists()


def test_a_damaged_record_is_named_and_not_guessed_around(tmp_path: Path) -> None:
    _publish(tmp_path, 1)
    record = tmp_path / "run" / ".publisher.json"
    record.write_bytes(b"{")
    with pytest.raises(PublishError, match=str(record)):
        WeightPublisher(tmp_path, "run")
    record.unlink()
    assert newest_in(tmp_path / "run") == Order(1, 1)
    _publish(tmp_path, 2)


def test_a_folder_in_the_way_is_never_overwritten(tmp_path: Path) -> None:
    """Not even an empty one, which POSIX would let a rename replace."""
    with WeightPublisher(tmp_path, "run") as publisher:
        (tmp_path / "run" / "v000001").mkdir()
        with pytest.raises(StepConflictError, match=r"v000001 exists"):
            publisher.publish(WEIGHTS, step=1)
    assert list((tmp_path / "run" / "v000001").iterdir()) == []
