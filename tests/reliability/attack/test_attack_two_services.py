"""Two services on one root, or on one state folder: the second refuses to start, and says why."""

from pathlib import Path

import pytest

from support.servers import RefitdServer, refitd_ended

pytestmark = [pytest.mark.e2e]


def start(root: Path, state: Path) -> tuple[int, str]:
    """Start another service, which is to end by itself; its exit code and what it said."""
    return refitd_ended("serve", "--root", str(root), "--state", str(state), "--port", "0")


def test_the_second_of_two_services_on_one_root_or_state_folder_refuses(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(mine)
    with RefitdServer(tmp_path, mine, []) as first:
        for root in (mine, tmp_path / "link"):
            code, said = start(root, tmp_path / "fresh")
            assert code != 0
            assert f"another refitd (pid {first.pid}) owns" in said
            assert "Traceback" not in said
        code, said = start(other, tmp_path / "state")
        assert code != 0
        assert f"another refitd (pid {first.pid})" in said
        assert "--state" in said
        assert "Traceback" not in said
        assert first.is_running
        first.stop()
    with RefitdServer(tmp_path, mine, []) as again:  # the locks went with the process
        assert again.is_running
