"""How long the service takes to read a version to its end, and how long its loop waits meanwhile, by size of chunks.

    PYTHONPATH=client:service:tests python tests/bench/contents.py [--gigabytes 3.09] [--root /dev/shm] [--threads 16]

With --fingerprinted the pass computes fingerprints as well, as of a folder without a manifest.

For each size of chunks (`taken`: the one that so many threads take), medians of the rounds: `read` is the time of the
pass, `cpu` what it took of the processors, `waits` how often a thread waited for another (voluntary context switches,
getrusage(2): mostly for the interpreter), `request` the time of some Python with a few calls to the kernel, as a
request is, beside it.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import numpy as np

from refitd_client import WeightPublisher
from refitd_client.checkpoint.header import Header, read_header
from refitd_client.checkpoint.opening import Folder
from refitd_client.validation import contents

_MIB = 2**20


def publish(root: Path, size: int) -> str:
    """A version of so many bytes, in files as the publisher cuts them."""
    count = 64
    bits = np.random.default_rng(0).integers(0, 0x7B00, size // 2 // count, dtype=np.uint16).view(np.float16)
    with WeightPublisher(root, "run") as publisher:
        return publisher.publish({f"w{number}": bits for number in range(count)}, step=1).path.name


def request() -> float:
    """Milliseconds of a request's worth of Python."""
    started = time.perf_counter()
    for _ in range(20):
        json.loads(json.dumps({"a": list(range(50))}))
        Path("/").stat()
    return (time.perf_counter() - started) * 1000


class Requests(threading.Thread):
    """One after the other until it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.times: list[float] = []

    def run(self) -> None:
        """Until told to stop."""
        while not self.stop.is_set():
            self.times.append(request())


def once(folder: Folder, headers: Mapping[str, Header], threads: int, fingerprinted: bool) -> Mapping[str, float]:
    """One pass, with requests beside it."""
    beside = Requests()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    contents.read_contents(folder, folder.list(), headers, threads=threads, fingerprinted=fingerprinted)
    took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    beside.start()
    contents.read_contents(folder, folder.list(), headers, threads=threads, fingerprinted=fingerprinted)
    beside.stop.set()
    beside.join()
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    waits = after.ru_nvcsw - before.ru_nvcsw
    return {
        "read_ms": took * 1000,
        "cpu_ms": cpu * 1000,
        "waits": waits,
        "request_ms": statistics.median(beside.times),
        "request_mean_ms": statistics.mean(beside.times),
    }


def measured(root: Path, threads: int, chunk: int, rounds: int, fingerprinted: bool) -> Mapping[str, float]:
    """The medians."""
    with Folder(root, "run/v000001") as folder, mock.patch.object(contents, "chunk_bytes", return_value=chunk):
        headers: dict[str, Header] = {}
        for name, file in folder.list().items():
            if name.endswith(".safetensors"):
                with folder.open(name, file) as fd:
                    headers[name] = read_header(fd, file.size)
        found = [once(folder, headers, threads, fingerprinted) for _ in range(rounds)]
    return {key: round(statistics.median(each[key] for each in found), 2) for key in found[0]}


def main() -> None:
    """Measure, and print a line of JSON for each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.09)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"))  # noqa: S108 a tmpfs is what is measured
    parser.add_argument("--threads", type=int, default=min(contents.MAX_THREADS, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fingerprinted", action="store_true", help="as of a folder without a manifest")
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="refitd-contents-", dir=asked.root))
    try:
        publish(root, int(asked.gigabytes * 10**9))
        for mib in (1, 2, 4, 8, 16):
            is_taken = contents.chunk_bytes(asked.threads) == mib * _MIB
            found = measured(root, asked.threads, mib * _MIB, asked.rounds, asked.fingerprinted)
            print(json.dumps({"threads": asked.threads, "chunk_mib": mib, "taken": is_taken, **found}), flush=True)
        alone = statistics.median(request() for _ in range(200))
        print(json.dumps({"request_alone_ms": round(alone, 2)}))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
