"""As much of SGLang's HTTP API as an update by files takes, at next to no cost: many engines in a process.

    light_engines.py COUNT MODEL LOAD_SECONDS

Prints "light ready on URL" for each engine and runs until SIGTERM. A thousand real engines do not fit on one machine,
and as many embedded ones would take more of its processors than the service that is measured. So these are no engines:
they hold no tensors, keep what they were told last, and write down when calls arrived.

GET /_calls     [[seconds, path], …] since the last time, on the machine's monotonic clock
"""

import asyncio
import json
import random
import signal
import sys
import time
from typing import Any

LOAD = b"/update_weights_from_disk"
CLOSE = "\r\nconnection: close"


class Engine:
    """What one engine says of itself, and the calls that it had."""

    def __init__(self, model: str, load_seconds: float, seed: int) -> None:
        self.load_seconds = load_seconds
        self.calls: list[tuple[float, str]] = []
        self._seed = seed
        self._model, self._path, self._label = model, model, "default"

    def answer(self, path: bytes, body: bytes) -> dict[str, Any] | list[Any]:
        """Answer one call."""
        if path == b"/model_info":
            return {"model_path": self._path, "weight_version": self._label}
        if path == b"/server_info":
            return {"version": "0.5.23", "model_path": self._model, "dtype": "bfloat16", "random_seed": self._seed}
        if path == b"/weights_checker":
            return {"ranks": [{"checksums": {"everything": f"{self._path} {self._label}"}}]}
        if path == b"/_calls":
            calls, self.calls = self.calls, []
            return calls
        if path == LOAD:
            order = json.loads(body)
            self._path, self._label = order["model_path"], order["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights."}
        return {"message": "ok"}


class Connection(asyncio.Protocol):
    """Reads requests, one after the other, and answers each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once the whole request is there."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        lower = head.lower()
        _, found, rest = lower.partition(b"content-length: ")
        length = int(rest.split(b"\r\n", 1)[0]) if found else 0
        if len(body) < length:
            return
        self._data = body[length:]
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST"):
            self._engine.calls.append((time.monotonic(), path.decode()))
        closes = b"connection: close" in lower
        later = self._engine.load_seconds if path == LOAD else 0.0
        if later:
            asyncio.get_running_loop().call_later(later, self._answer, path, body[:length], closes)
        else:
            self._answer(path, body[:length], closes)

    def _answer(self, path: bytes, body: bytes, closes: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        said = json.dumps(self._engine.answer(path, body)).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(said)}"
        self._transport.write(f"{head}{CLOSE if closes else ''}\r\n\r\n".encode() + said)
        if closes:
            self._transport.close()


async def main(count: int, model: str, load_seconds: float) -> None:
    """Listen on as many ports as there are engines."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    chance = random.SystemRandom()
    for _ in range(count):
        engine = Engine(model, load_seconds, chance.getrandbits(30))
        server = await loop.create_server(lambda engine=engine: Connection(engine), "127.0.0.1", 0, backlog=64)
        print(f"light ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
