"""Watchers of an event stream, all in one process that counts what each of them sees.

    watchers.py URL COUNT

Prints "watchers ready on URL" when all are connected. At SIGTERM, and when nothing has come for a second, prints for
each watcher how many events came, the number of the last one, and how many were missing or came twice; then ends.
"""

import asyncio
import json
import re
import signal
import sys
from urllib.parse import urlsplit

ID = re.compile(rb"^id: (\d+)$", re.MULTILINE)


class Watcher:
    """One connection."""

    def __init__(self) -> None:
        self.count = self.last = self.wrong = 0

    async def run(self, host: str, port: int, connected: asyncio.Event) -> None:
        """Read until cancelled or dropped."""
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        writer.write(f"GET /v1/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        connected.set()
        rest = b""
        while data := await reader.read(2**18):
            *whole, rest = (rest + data).split(b"\n\n")
            for found in ID.findall(b"\n".join(whole)):
                number = int(found)
                self.wrong += self.last not in {0, number - 1}
                self.count, self.last = self.count + 1, number


async def main(url: str, count: int) -> None:
    """Watch."""
    target = urlsplit(url)
    watchers = [Watcher() for _ in range(count)]
    connected = [asyncio.Event() for _ in watchers]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    tasks = [
        asyncio.ensure_future(watcher.run(target.hostname or "", target.port or 0, event))
        for watcher, event in zip(watchers, connected, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in connected))
    print(f"watchers ready on {url}", flush=True)
    await ended.wait()
    before = -1
    while (now := sum(watcher.count for watcher in watchers)) != before:
        before = now
        await asyncio.sleep(1.0)
    for task in tasks:
        task.cancel()
    print(json.dumps([[watcher.count, watcher.last, watcher.wrong] for watcher in watchers]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
