"""`refitd serve` as a process, where it cannot start or starts with a setting that is probably a slip."""

import socket
import subprocess
import sys
from pathlib import Path


def serve(root: Path, *flags: str) -> "subprocess.Popen[str]":
    root.mkdir()
    state = ("--state", str(root.with_name("state")))
    command = [sys.executable, "-m", "refitd", "serve", "--root", str(root), *state, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_port_that_is_taken_ends_it_with_one_line_and_before_a_journal_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(tmp_path / "root", "--port", str(port)) as process:
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert f"port {port} on 127.0.0.1 is taken: choose another with --port" in line
    assert not list((tmp_path / "state").glob("journal*"))
