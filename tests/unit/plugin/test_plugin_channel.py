"""The channel answers what is asked, bounds what comes, and never takes the engine with it."""

import errno
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from refitd_client.contract.plugin import MAX_LINE, PluginRequest
from refitd_plugin import channel
from refitd_plugin.channel import MAX_CONNECTIONS, Channel, Reply
from support.sockets import ask, listens, reach


def opened(root: Path, handle: Callable[[PluginRequest], Reply]) -> Path:
    """Open a channel and wait until it listens."""
    each = Channel(root, 0, handle)
    each.open()
    assert each.is_open(30)
    return root / ".refitd" / "engines" / each.name


def echo(request: PluginRequest) -> Reply:
    return {"ok": True, "do": request.do, "path": request.path}


def said(path: Path, data: bytes) -> list[dict[str, Any]]:
    """All replies to some bytes, until the other side has no more to say."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        reach(line, path)
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        with line.makefile("rb") as replies:
            return [json.loads(reply) for reply in replies]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".refitd").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "line", [b"\n", b"nonsense\n", b"[" * 5000 + b"\n", b'{"do":"die"}\n', b'{"do":"hello","and":1}\n', b"\xff\n"]
)
def test_what_is_no_request_is_refused_and_the_line_stays_open(root: Path, line: bytes) -> None:
    replies = said(opened(root, echo), line + b'{"do":"hello"}\n')
    assert [reply["ok"] for reply in replies] == [False, True]


def test_a_line_without_end_is_cut_off(root: Path) -> None:
    path = opened(root, echo)
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        reach(line, path)
        line.sendall(b"x" * (MAX_LINE + 1))
        with line.makefile("rb") as replies:
            assert "bytes" in json.loads(replies.readline())["reason"]
            assert replies.readline() == b""


def test_a_request_has_a_time_to_come_in_whole_however_often_a_byte_comes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "SILENT_SECONDS", 0.2)
    path, over = opened(root, echo), threading.Event()
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        reach(line, path)

        def drip() -> None:
            with suppress(OSError):
                while not over.wait(0.02):
                    line.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with suppress(ConnectionResetError):
                assert line.recv(1000) == b""
        finally:
            over.set()
            dripping.join()
    assert ask(path, do="hello")["ok"]


def test_a_handler_that_fails_is_an_answer(root: Path) -> None:
    def broken(request: PluginRequest) -> Reply:
        raise ZeroDivisionError(request.do)

    path = opened(root, broken)
    assert ask(path, do="hello") == {"ok": False, "reason": "ZeroDivisionError: hello"}
    assert ask(path, do="forget")["reason"] == "ZeroDivisionError: forget"


def test_more_connections_than_it_takes_are_closed_and_places_become_free(root: Path) -> None:
    path = opened(root, echo)
    lines = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS)]
    for line in lines:
        line.settimeout(30)
        reach(line, path)
        line.sendall(b'{"do":"hello"}\n')
        assert line.recv(1000)
    with socket.socket(socket.AF_UNIX) as one_more:
        one_more.settimeout(30)
        reach(one_more, path)
        assert one_more.recv(1000) == b""
    for line in lines:
        line.close()
    deadline = time.monotonic() + 30
    while not said_something(path):
        assert time.monotonic() < deadline


def test_no_thread_is_started_for_a_request(root: Path) -> None:
    path = opened(root, lambda _: {"ok": True, "thread": threading.get_ident()})
    started = {thread.ident for thread in threading.enumerate()}
    assert {ask(path, do="hello")["thread"] for _ in range(2 * MAX_CONNECTIONS)} <= started


def test_a_channel_that_cannot_take_connections_any_more_leaves_no_thread_and_no_socket(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, usual = set(threading.enumerate()), sys.getswitchinterval()
    monkeypatch.setattr(channel, "_LISTENING_SECONDS", usual / 2)
    path = opened(root, echo)
    assert sys.getswitchinterval() < usual
    its_own = set(threading.enumerate()) - before
    assert len(its_own) == 1 + MAX_CONNECTIONS + 1
    monkeypatch.setattr(Channel, "_serve", broken_off)
    with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        reach(line, path)
    for thread in its_own:
        thread.join(30)
    assert not any(thread.is_alive() for thread in its_own)
    assert not path.exists()
    assert sys.getswitchinterval() >= usual  # a thread of the test before may have had it short, and end meanwhile
    assert "no channel" in caplog.text


def broken_off(_: Channel, connection: socket.socket) -> None:
    connection.close()
    raise OSError(errno.EMFILE, "Too many open files")


def said_something(path: Path) -> bool:
    try:
        return bool(said(path, b'{"do":"hello"}\n'))
    except OSError:
        return False


def test_it_waits_for_the_services_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CHANNEL_RETRY_SECONDS", 0.01)
    each = Channel(tmp_path, 0, echo)
    each.open()
    (tmp_path / ".refitd").mkdir()
    path = tmp_path / ".refitd" / "engines" / each.name
    deadline = time.monotonic() + 30
    while not listens(path):
        assert time.monotonic() < deadline
    assert path.stat().st_mode & 0o777 == 0o660


def test_a_root_with_a_very_long_name_is_no_obstacle(tmp_path: Path) -> None:
    root = tmp_path / ("d" * 120)
    (root / ".refitd").mkdir(parents=True)
    each = Channel(root, 0, echo)
    each.open()
    path = root / ".refitd" / "engines" / each.name
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline


def test_a_link_in_place_of_the_services_folder_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / ".refitd").symlink_to(elsewhere)
    Channel(root, 0, echo)._run()
    assert "no channel" in caplog.text
    assert list(elsewhere.iterdir()) == []
