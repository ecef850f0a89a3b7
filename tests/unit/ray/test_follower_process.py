"""The child process of a Ray actor: a stand-in for `refitd serve`, really started, killed and left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from refitd_client.errors import FollowerStartError
from refitd_client.ray import FollowerProcess
from support.sockets import free_port

PATIENCE = 60.0
# Ready at the second look, as a service that lists its root first; its port is that of the flag, or a free one.
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    looks = 0
    def do_GET(self):
        Handler.looks += 1
        self.send_response(200 if Handler.looks > 1 else 503)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
print(f'{{"event": "refitd ready on http://127.0.0.1:{server.server_port}"}}', flush=True)
server.serve_forever()
"""
OWNER = """
import sys, time
from refitd_client.ray import FollowerProcess
kept = FollowerProcess([sys.executable, "-c", {stand_in!r}], 0)
kept.wait_ready(60)
print("child", kept.pid, flush=True)
time.sleep(1000)
"""


def until(what: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.01)


@contextmanager
def kept(script: str, port: int = 0) -> Iterator[FollowerProcess]:
    process = FollowerProcess([sys.executable, "-c", script], port)
    try:
        yield process
    finally:
        process.stop()


def test_a_process_is_waited_for_until_it_is_ready_and_says_where_it_listens() -> None:
    with kept(STAND_IN) as process:
        url = process.wait_ready(PATIENCE)
        assert url.startswith("http://127.0.0.1:")
        pid = process.pid
        assert pid is not None
    assert process.pid is None
    assert not psutil.pid_exists(pid), "stop ends it"


def test_a_process_that_dies_is_started_again_on_the_port_that_it_had() -> None:
    with kept(STAND_IN) as process:
        url, first = process.wait_ready(PATIENCE), process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: process.pid not in {None, first})
        assert process.wait_ready(PATIENCE) == url


def test_a_process_listens_on_the_port_that_was_asked_for() -> None:
    port = free_port()
    with kept(STAND_IN, port) as process:
        assert process.wait_ready(PATIENCE) == f"http://127.0.0.1:{port}"


def test_a_process_that_ends_at_once_is_told_with_what_it_printed() -> None:
    told = pytest.raises(FollowerStartError, match=r"ended with exit status 1(?s:.*)the root is no folder")
    with kept("import sys; sys.exit('refitd: the root is no folder')") as process, told:
        process.wait_ready(PATIENCE)


def test_a_process_that_does_not_become_ready_in_time_is_told() -> None:
    with kept("import time; print('lists the root', flush=True); time.sleep(1000)") as process:
        until(lambda: process.pid is not None)
        with pytest.raises(FollowerStartError, match=r"not ready after 0\.2 s"):
            process.wait_ready(0.2)


def test_a_process_ends_with_the_one_that_keeps_it_also_when_that_is_killed(tmp_path: Path) -> None:
    """Ray kills the process of an actor; nobody would stop a follower that is left behind, which has root and port."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(stand_in=STAND_IN))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        said = next(line for line in owner.stdout if line.startswith("child "))
        child = psutil.Process(int(said.split()[1]))
        owner.kill()
    child.wait(PATIENCE)
