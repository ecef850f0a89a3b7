"""Threads that decode into one type at the same moment, in a process that has never decoded into it."""

import subprocess
import sys

import pytest

THREADS = """
import random, sys, threading, time
from refitd_client.contract.decoding import converted, from_json
from refitd_client.contract.follow import Following

seed, way = int(sys.argv[1]), {"json": from_json, "data": lambda data, kind: converted(PLAIN, kind)}[sys.argv[2]]
PLAIN = {"follower": "a", "upstream": "b", "upstreams": ["c"], "host": {"follower": "x"}}
DATA = b'{"follower": "a", "upstream": "b", "upstreams": ["c"], "host": {"follower": "x"}}'
sys.setswitchinterval(1e-5)
waits = random.Random(seed)
together = threading.Barrier(12)

def decode(wait):
    together.wait()
    time.sleep(wait)
    for _ in range(3):
        assert way(DATA, Following).host.follower == "x"

threads = [threading.Thread(target=decode, args=(waits.random() * 0.003,)) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("way", ["json", "data"])
def test_a_type_that_many_threads_decode_into_first_ends_no_process(way: str) -> None:
    """With msgspec alone seventeen of forty such processes ended by a segmentation fault."""
    for seed in range(12):
        done = subprocess.run(
            [sys.executable, "-c", THREADS, str(seed), way], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (seed, done.stderr)
