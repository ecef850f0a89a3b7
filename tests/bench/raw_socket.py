"""What a socket brings from one process to another on this machine: sendfile there, recv_into here, nothing else."""

import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

PART = 2**24
TIMES = 8  # that the file goes over each connection: the first bytes are slower, and a part's buffer is new memory then


def raw_rates(file: Path, target: Path, *, connections: int) -> dict[str, float]:
    """Bytes a second of a file's parts over some connections, into memory and into a new file `target`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs, str(target), file.stat().st_size, connections))
    receiver.start()
    port = ours.recv()
    rates: dict[str, float] = {}
    try:
        for where in ("memory", "file"):
            threads = [threading.Thread(target=_send, args=(port, file, n, connections)) for n in range(connections)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates[where] = TIMES * file.stat().st_size / ours.recv()
    finally:
        receiver.join(30)
        target.unlink(missing_ok=True)
    return rates


def _send(port: int, file: Path, first: int, connections: int) -> None:
    size = file.stat().st_size
    with file.open("rb") as source, socket.create_connection(("127.0.0.1", port)) as to:
        to.sendall(first.to_bytes(1, "little"))
        for start in TIMES * [*range(first * PART, size, connections * PART)]:
            at, end = start, min(start + PART, size)
            while at < end:
                at += os.sendfile(to.fileno(), source.fileno(), at, end - at)


def _receive(parent: Connection, target: str, size: int, connections: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=connections) as listener:
        parent.send(listener.getsockname()[1])
        for where in ("memory", "file"):
            fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o600) if where == "file" else None
            if fd is not None:
                os.ftruncate(fd, size)
            peers = [listener.accept()[0] for _ in range(connections)]
            began = time.monotonic()
            threads = [threading.Thread(target=_take, args=(peer, fd, size, connections)) for peer in peers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            parent.send(time.monotonic() - began)
            if fd is not None:
                os.close(fd)


def _take(peer: socket.socket, fd: int | None, size: int, connections: int) -> None:
    buffer = memoryview(bytearray(PART))
    with peer:
        first = peer.recv(1)[0]
        for start in TIMES * [*range(first * PART, size, connections * PART)]:
            count, at = min(PART, size - start), 0
            while at < count:
                at += peer.recv_into(buffer[at:count])
            if fd is not None:
                os.pwrite(fd, buffer[:count], start)
