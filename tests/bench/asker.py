"""Asks a service one thing after the other, from a process of its own: how long it takes to answer.

    asker.py URL EVERY PATH …

Prints "asker ready on URL"; at each line on its standard input the milliseconds since the last one, as JSON by path.
"""

import json
import sys
import threading
import time

import httpx


def main(url: str, every: float, paths: list[str]) -> None:
    """Ask until standard input ends."""
    took: dict[str, list[float]] = {path: [] for path in paths}
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            number = 0
            while not ended.wait(every):
                path = paths[number % len(paths)]
                asked = time.monotonic()
                http.get(path).raise_for_status()
                took[path].append((time.monotonic() - asked) * 1000)
                number += 1

    asking = threading.Thread(target=ask)
    asking.start()
    print(f"asker ready on {url}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(took), flush=True)
        for samples in took.values():
            samples.clear()
    ended.set()
    asking.join()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
