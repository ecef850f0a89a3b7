"""A server whose answers have no end: it begins each so, and then sends more until its client has gone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + bytes(2**16) + b"\r\n"


@contextmanager
def answering(begin: bytes, more: bytes, *, pause: float = 0.0) -> Iterator[str]:
    """Serve on loopback, and give the URL.

    Args:
        begin: of each answer.
        more: is sent again and again.
        pause: seconds before it is.
    """
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            connection.sendall(begin)
            while not over.wait(pause):
                connection.sendall(more)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
