"""Requests in flight through updates: whether any is lost, and how long the tokens of each wait.

They are followed by a process of their own: in that of a trainer their threads would wait for its interpreter's lock.
"""

import json
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from dialects import DIALECTS, Dialect

Window = tuple[float, float]
"""From when a pause was asked for until the reply to what ended it, in seconds of `time.perf_counter`."""


@dataclass(slots=True)
class Stream:
    """One request: when something of it came, and how many tokens it had in the end."""

    times: list[float] = field(default_factory=list[float])
    tokens: int = 0

    def gaps(self) -> list[Window]:
        """From each arrival to the next."""
        return list(zip(self.times, self.times[1:], strict=False))


@contextmanager
def in_flight(url: str, count: int, tokens: int, dialect: Dialect = DIALECTS["sglang"]) -> Generator[list[Stream]]:
    """So many streamed requests, begun together, until each has come to its end. All have begun when it yields; what
    became of them is known after the block.
    """
    name = next(name for name, each in DIALECTS.items() if each is dialect)
    command = [sys.executable, __file__, url, str(count), str(tokens), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None or process.stdout.readline() != "begun\n":
            raise RuntimeError("the requests have not begun")
        streams = [Stream() for _ in range(count)]
        yield streams
        for stream, (times, found) in zip(streams, json.loads(process.stdout.readline()), strict=True):
            stream.times, stream.tokens = times, found


def _follow_all(url: str, count: int, tokens: int, dialect: Dialect) -> None:
    streams = [Stream() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        texts = [dialect.body(f"story {n}", tokens, stream=True) for n in range(count)]
        running = [pool.submit(_follow, url, dialect, *each) for each in zip(texts, streams, strict=True)]
        while not all(stream.times for stream in streams) and not any(each.done() for each in running):
            time.sleep(0.01)
        print("begun", flush=True)
        for each in running:
            each.result()
    print(json.dumps([(stream.times, stream.tokens) for stream in streams]), flush=True)


def told(streams: Sequence[Stream], windows: Sequence[Window], tokens: int) -> dict[str, Any]:
    """What became of them. A stall belongs to a window when it has a moment in common with it."""
    beyond, within, outside = [], [], [0.0]
    for begin, end in windows:
        stalls = [
            after - before for stream in streams for before, after in stream.gaps() if before < end and begin < after
        ]
        within.append(max(stalls, default=0.0) * 1000)
        beyond.append(within[-1] - (end - begin) * 1000)
    for stream in streams:
        outside += [b - a for a, b in stream.gaps() if not any(a < end and begin < b for begin, end in windows)]
    last = max((end for _, end in windows), default=0.0)
    return {
        "requests": len(streams),
        "lost": sum(stream.tokens != tokens for stream in streams),
        "tokens": [stream.tokens for stream in streams],
        "in flight after the last update": sum(stream.times[-1] > last for stream in streams),
        "longest stall ms": [round(each, 1) for each in within],
        "beyond the pause ms": [round(each, 1) for each in beyond],
        "longest gap without an update ms": round(max(outside) * 1000, 1),
    }


def _follow(url: str, dialect: Dialect, body: dict[str, Any], stream: Stream) -> None:
    with httpx.stream("POST", url + dialect.route, json=body, timeout=120, trust_env=False) as reply:
        for line in reply.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                stream.times.append(time.perf_counter())
                stream.tokens = dialect.tokens(stream.tokens, line)


if __name__ == "__main__":
    _follow_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), DIALECTS[sys.argv[4]])
