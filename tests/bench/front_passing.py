"""What the front's pass-through costs: streams of answers straight from an engine and through the front, in turns.

    python tests/bench/front_passing.py --url ENGINE --front FRONT [--streams 64] [--tokens 256] [--out FILE]

Each round begins as many streams at once and reads them to their ends. The clients run in four processes, so that they
are not what is measured. Tokens a second are those of all streams together; the first token's time is from the request.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx

PROCESSES = 4


async def _stream(http: httpx.AsyncClient, url: str, tokens: int) -> tuple[int, float]:
    """Read one answer as it comes; its tokens, and seconds until the first."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    began, first, chunks = time.monotonic(), 0.0, 0
    async with http.stream(
        "POST", f"{url}/generate", json={"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "stream": True}
    ) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunks += 1
                first = first or time.monotonic() - began
                last = line
    return int(json.loads(last[6:])["meta_info"]["completion_tokens"]), first


def _streams(url: str, streams: int, tokens: int) -> list[tuple[int, float]]:
    async def all_of_them() -> list[tuple[int, float]]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            return await asyncio.gather(*(_stream(http, url, tokens) for _ in range(streams)))

    return asyncio.run(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--front")
    for name, default in (("streams", 64), ("tokens", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ways = {"straight": given.url, "front": given.front}
    figures: dict[str, Any] = {"streams": given.streams, "command": " ".join(sys.argv)}
    with ProcessPoolExecutor(PROCESSES) as processes:
        for number in range(given.rounds + 1):
            for way, url in ways.items():
                began = time.monotonic()
                share = given.streams // PROCESSES
                asked = [processes.submit(_streams, url, share, given.tokens) for _ in range(PROCESSES)]
                done = [each for part in asked for each in part.result()]
                rate = sum(tokens for tokens, _ in done) / (time.monotonic() - began)
                if number:  # the first one warms up
                    figures.setdefault(way, []).append(round(rate))
                    figures.setdefault(f"{way} first ms", []).append(
                        round(1000 * statistics.median(first for _, first in done), 1)
                    )
    for way in ways:
        rates, firsts = figures[way], figures[f"{way} first ms"]
        print(
            f"{way:9} {statistics.median(rates):8.0f} tokens/s   {min(rates)} to {max(rates)}   "
            f"first {statistics.median(firsts):.0f} ms"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
