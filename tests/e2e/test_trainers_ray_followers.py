"""`examples/ray/followers.py` in a real Ray of two nodes."""

from typing import Any

import pytest

from support.trainers import PROGRAMS, report_of, run_there

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(run_there(PROGRAMS / "ray_followers.py", tmp_path_factory.mktemp("ray")))


def test_each_node_gets_a_follower_that_serves_what_is_published(report: dict[str, Any]) -> None:
    """The program waits until the engines of both nodes serve each step."""
    assert report["nodes"] == report["expected nodes"]


def test_a_follower_that_is_killed_is_started_again_where_it_was(report: dict[str, Any]) -> None:
    assert report["same urls after a kill"] is True


def test_a_follower_ends_with_its_actor_and_is_started_again_with_it(report: dict[str, Any]) -> None:
    """The program waits for the end of both."""
    assert report["another process after its actor's end"] is True


def test_what_keeps_a_follower_from_starting_is_said_by_what_it_printed(report: dict[str, Any]) -> None:
    assert "--no-such-flag" in report["bad flag"]
