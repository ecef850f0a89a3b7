"""Parts of files that the kernel sends: to a client that takes them, and to one that holds a thread."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from refitd.api import connection
from refitd.api.connection import PIECE, NotSentError, send_part


async def sent(tmp_path: Path, size: int, take: Callable[[socket.socket], None], patience: float) -> None:
    """Send a file of this size to a client."""
    file = tmp_path / "file"
    file.touch()
    os.truncate(file, size)
    ours, its = socket.socketpair()
    ours.setblocking(False)
    client = threading.Thread(target=take, args=(its,))
    client.start()
    opened = os.open(file, os.O_RDONLY)
    try:
        await send_part(ours, opened, 0, size, patience=patience, is_closed=lambda: False)
    finally:
        os.close(opened)
        ours.close()
        its.shutdown(socket.SHUT_RDWR)
        client.join()
        its.close()


async def test_a_client_that_takes_a_little_now_and_then_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CLOSED_LOOK_SECONDS", 0.02)
    never = threading.Event()

    def drip(line: socket.socket) -> None:
        with suppress(OSError):
            while not never.wait(0.005) and line.recv(4096):
                pass

    with pytest.raises(NotSentError, match="too slow"):
        await sent(tmp_path, 4 * PIECE, drip, patience=0.3)


async def test_a_client_that_takes_each_piece_in_time_gets_all(tmp_path: Path) -> None:
    taken: list[int] = []

    def take(line: socket.socket) -> None:
        while data := line.recv(2**20):
            taken.append(len(data))

    await sent(tmp_path, 3 * PIECE, take, patience=30)
    assert sum(taken) == 3 * PIECE
