"""`block="staged"`: the trainer goes on, and nothing is lost, mixed up or kept from it."""

import gc
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from refitd_client import (
    InvalidWeightsError,
    PublishError,
    PublishOptions,
    RunBusyError,
    StepConflictError,
    WeightPublisher,
)
from refitd_client.write import version_folder
from support import durable_effects, published


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "root" / "run"


@pytest.fixture
def publisher(run: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(run.parent, "run", options=PublishOptions(max_shard_bytes=256)) as opened:
        yield opened


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is sealed in the background before it is set."""
    opened = threading.Event()
    seal = version_folder.Staging.seal

    def waiting(*args: object) -> None:
        assert threading.current_thread() is threading.main_thread() or opened.wait(30)
        seal(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(version_folder.Staging, "seal", waiting)
    yield opened
    opened.set()


@contextmanager
def opened_when_free(run: Path) -> Generator[WeightPublisher]:
    """A run is free when the thread of a publisher that was let go of has ended, a moment after its outcome."""
    for thread in threading.enumerate():
        if thread.name.startswith("refitd-publisher"):
            thread.join(30)
    with WeightPublisher(run.parent, run.name) as publisher:
        yield publisher


def used(root: Path) -> list[str]:
    """The files under a root that this process has open or mapped."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [name for name in [*links, *Path("/proc/self/maps").read_text().splitlines()] if str(root) in name]


def bad() -> dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
    weights = durable_effects.weights(2)
    weights["a"][0, 0] = np.inf
    return weights


@pytest.mark.parametrize("recycle", [False, True])
def test_tensors_may_change_as_soon_as_it_returns(
    run: Path, publisher: WeightPublisher, gate: threading.Event, recycle: bool
) -> None:
    if recycle:
        durable_effects.make_slot(run.parent)
    weights = durable_effects.weights(1)
    publication = publisher.publish(weights, step=1, block="staged")
    assert published.versions(run) == [], "nothing is visible yet"
    for tensor in weights.values():
        tensor.fill(77)
    gate.set()
    committed = publication.committed(30)
    assert (committed.step, committed.path, committed.version_id) == (1, publication.path, publication.version_id)
    published.check(publication.path)
    got = published.tensors(publication.path)
    assert all(np.array_equal(got[name], value) for name, value in durable_effects.weights(1).items())


def test_publications_are_committed_in_order(run: Path, publisher: WeightPublisher) -> None:
    for step in range(1, 6):
        publisher.publish(durable_effects.weights(step), step=step, block="staged")
        before = published.versions(run)
        assert [f"v{number:06d}" for number in range(1, step)] == before[: step - 1]
    publisher.publish(durable_effects.weights(6), step=6)
    assert published.versions(run) == [f"v{number:06d}" for number in range(1, 7)]


def test_an_error_is_raised_by_the_next_call_which_publishes_nothing(run: Path, publisher: WeightPublisher) -> None:
    publisher.publish(bad(), step=2, block="staged")
    with pytest.raises(InvalidWeightsError, match="tensor a holds 1 value"):
        publisher.publish(durable_effects.weights(3), step=3)
    assert (published.versions(run), published.leftovers(run)) == ([], [])
    publisher.publish(durable_effects.weights(3), step=3)
    assert published.versions(run) == ["v000003"]


def test_an_error_that_nobody_has_heard_of_is_raised_by_close(run: Path) -> None:
    publisher = WeightPublisher(run.parent, "run")
    publisher.publish(bad(), step=2, block="staged")
    with pytest.raises(InvalidWeightsError):
        publisher.close()
    publisher.close()
    WeightPublisher(run.parent, "run").close()  # the run was let go all the same


def test_close_waits_for_the_commit(run: Path, gate: threading.Event) -> None:
    publisher = WeightPublisher(run.parent, "run")
    publisher.publish(durable_effects.weights(1), step=1, block="staged")
    closing = threading.Thread(target=publisher.close)
    closing.start()
    assert published.versions(run) == []
    gate.set()
    closing.join(30)
    assert published.versions(run) == ["v000001"]
    published.check(run / "v000001")


def test_the_same_step_twice_is_a_conflict_though_the_first_is_on_its_way(publisher: WeightPublisher) -> None:
    publisher.publish(durable_effects.weights(1), step=1, block="staged")
    with pytest.raises(StepConflictError):
        publisher.publish(durable_effects.weights(1), step=1)


def test_an_io_error_at_every_step_of_the_background_is_delivered(run: Path, tmp_path: Path) -> None:
    """And nothing of the version is left."""
    met = 0
    for number in range(1, 100):
        with WeightPublisher(tmp_path / str(number), "run", options=PublishOptions(max_shard_bytes=256)) as publisher:
            error = _fail_staged(publisher, number)
            place = tmp_path / str(number) / "run"
            if error is None:
                assert published.versions(place) == ["v000001"]
                break
            met += 1
            assert (published.versions(place), published.leftovers(place)) == ([], []), error
    assert met > 12


def _fail_staged(publisher: WeightPublisher, number: int) -> PublishError | None:
    def act(count: int, *_: object) -> None:
        if count == number:
            raise OSError(5, "Input/output error")

    originals = durable_effects.on_each_effect(act)
    try:
        publisher.publish(durable_effects.weights(1), step=1, block="staged").committed()
    except PublishError as error:
        return error
    finally:
        durable_effects.restore(originals)
    return None


KILLED = dedent("""
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from support import durable_effects
    from refitd_client import PublishOptions, WeightPublisher
    from refitd_client.write import version_folder

    version_folder.Staging.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    publisher = WeightPublisher(sys.argv[2], "run", options=PublishOptions(max_shard_bytes=256))
    publisher.publish(durable_effects.weights(1), step=1, block="staged").committed()
    """)


def test_a_trainer_killed_between_staging_and_commit_leaves_nothing_visible(run: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[2]), str(run.parent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert published.versions(run) == []
    assert len(published.leftovers(run)) == 1
    with WeightPublisher(run.parent, "run") as publisher:
        publisher.publish(durable_effects.weights(1), step=1)
    published.check(run / "v000001")


LATE = dedent("""
    import sys, threading, time
    from concurrent.futures import thread as pools
    import numpy as np
    from refitd_client import PublishOptions, WeightPublisher
    from refitd_client.write import content as shards

    def late(*args, **kwargs):
        while threading.current_thread() is not threading.main_thread() and not pools._shutdown:
            time.sleep(0.01)
        return lanes(*args, **kwargs)

    lanes, shards.in_lanes, shards.lanes_for = shards.in_lanes, late, lambda _: 2
    publisher = WeightPublisher(sys.argv[1], "run", options=PublishOptions(max_shard_bytes=2**22))
    publisher.publish({f"t{n}": np.full((1024, 1024), n, np.float32) for n in range(3)}, step=1, block="staged")
    """)


def test_threads_can_still_be_begun_at_the_end_of_the_interpreter(run: Path) -> None:
    """A pool refuses work then, and the version would be lost without a word."""
    done = subprocess.run([sys.executable, "-c", LATE, str(run.parent)], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    published.check(run / "v000001")


def test_a_publisher_that_is_let_go_of_holds_its_run_until_its_last_version_is_there(
    run: Path, gate: threading.Event
) -> None:
    """A second one would see neither the version nor its record, and give its step away once more."""
    publication = WeightPublisher(run.parent, "run").publish(durable_effects.weights(5), step=5, block="staged")
    gc.collect()
    with pytest.raises(RunBusyError):
        WeightPublisher(run.parent, "run")
    gate.set()
    publication.committed()
    with opened_when_free(run) as second:
        assert second.publish(durable_effects.weights(5), step=5).path == run / "v000005.g2"
    published.check(run / "v000005")


@pytest.mark.parametrize("block", ["staged", "committed"])
def test_a_publisher_that_is_let_go_of_gives_memory_and_descriptors_back(block: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="refitd-let-go-", dir="/dev/shm") as folder:
        root = Path(folder, "root")
        durable_effects.make_slot(root)
        publisher = WeightPublisher(root, "run", options=PublishOptions(max_shard_bytes=256))
        publisher.publish(durable_effects.weights(1), step=1, block=block)
        assert used(root), "its files are kept mapped for the next version"
        del publisher
        gc.collect()
        with opened_when_free(root / "run"):
            pass
        assert not used(root)
