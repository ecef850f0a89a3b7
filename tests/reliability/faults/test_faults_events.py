"""Hints that do not come: file events that overflow, are refused or do not exist. The scan finds every version."""

from pathlib import Path

import pytest

from faults.room import room
from faults.stand import Subject, standing
from refitd_client import WeightPublisher
from support.jobs import RUN

QUEUE = Path("/proc/sys/fs/inotify/max_queued_events")


def publish_unannounced(root: Path, engine: Subject, step: int, run: str = RUN) -> None:
    """Write a version, and tell nobody."""
    with WeightPublisher(root, run) as publisher:
        publisher.publish(engine.model(step), step=step)


def test_event_overflow_loses_no_version(engine: Subject, tmp_path: Path) -> None:
    """While the service stands still, more happens than the kernel keeps events of; versions come after that."""
    with standing(tmp_path, engine) as stand:
        stand.serve(engine.model(1), 1)
        publish_unannounced(stand.root, engine, 2)
        stand.is_served(2)  # it watches the run's folder
        stand.process.suspend()
        one, other = stand.root / RUN / "a", stand.root / RUN / "b"
        one.touch()
        for _ in range(int(QUEUE.read_text()) // 4 + 500):  # each of the two is two events, from here and to there
            one.rename(other)
            other.rename(one)
        publish_unannounced(stand.root, engine, 3)
        stand.process.resume()
        stand.is_served(3)
        assert engine.serves(3)


@pytest.mark.parametrize("watches", [0, 3])
def test_event_watches_that_run_out_lose_no_version(watches: int, engine: Subject, tmp_path: Path) -> None:
    """The kernel gives no watch at all at the start; or none for the folders that come later."""
    with room() as where:
        where.do("sh", "-c", f"echo {watches} > /proc/sys/user/max_inotify_watches")
        with standing(tmp_path, engine, first=where.enter) as stand:
            publish_unannounced(stand.root, engine, 1)
            stand.is_served(1)
            publish_unannounced(stand.root, engine, 2)
            stand.is_served(2)
            assert engine.serves(2)
            assert stand.refitd.is_running
