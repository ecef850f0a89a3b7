"""How long the service takes to make the copy of a delta, for engines that take none, beside `cp`.

    PYTHONPATH=tests python tests/bench/copies.py [--root DIR] [--megabytes 2944] [--tensors 338] [--share 0.01]
        [--rounds 5]

A full version and two deltas of `share` of all elements are published into DIR, which is made for it and deleted at the
end. In each round a copy is made from the full version, and another from that copy. Before each round `cp` copies the
full version's files, as many at a time as there are processors. Printed are the medians of wall-clock and processor
seconds, and how many times as long as `cp` each took. The page cache has all of it if DIR is in memory (`/dev/shm`, as
where none is named) or memory suffices.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TypeVar

import numpy as np

from refitd.policy.materialize import Copy, MakeCopy
from refitd.state.version import VersionRecord
from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.delta import DeltaRules
from refitd_inside.materialize.disk import DiskCopies
from support.deltas import RUN, record_of
from support.inside import in_process

ResultT = TypeVar("ResultT")


def published(root: Path, megabytes: int, tensors: int, share: float) -> list[VersionRecord]:
    """A full version, and two deltas on it."""
    random, found = np.random.default_rng(0), list[VersionRecord]()
    elements = megabytes * 2**20 // 2 // tensors
    weights = {f"w{number}": random.integers(0, 2**14, elements, dtype=np.uint16) for number in range(tensors)}
    with WeightPublisher(
        root, RUN, options=PublishOptions(delta_rules=DeltaRules(threshold=0.5), fingerprints=True)
    ) as publisher:
        in_process(publisher)._context.deltas._ask_base = lambda: found[-1].id
        for step in (1, 2, 3):
            named = {name: bits.view(np.float16) for name, bits in weights.items()}
            found.append(record_of(root, publisher.publish(named, step=step, transport="delta")))
            for bits in weights.values():
                bits[random.integers(0, elements, int(elements * share))] ^= 1
    return found


class Times:
    """Wall-clock and processor seconds, by what was done."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[float, float]]] = {}

    def take(self, what: str, work: Callable[[], ResultT]) -> ResultT:
        """Do it, and note how long it took this process and those that it has waited for."""
        began, spent = time.perf_counter(), _processor_seconds()
        result = work()
        self._taken.setdefault(what, []).append((time.perf_counter() - began, _processor_seconds() - spent))
        return result

    def show(self, beside: str) -> None:
        """Print the medians, the spread, and the ratio to one of them."""
        unit = statistics.median(wall for wall, _ in self._taken[beside])
        for what, taken in self._taken.items():
            walls, spent = sorted(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken)
            wall = statistics.median(walls)
            print(
                f"{what:36} {wall:6.2f} s ({walls[0]:.2f} to {walls[-1]:.2f}), {spent:6.2f} s of processors, "
                f"{wall / unit:5.2f} times {beside}"
            )


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def copied_by_cp(source: Path, target: Path) -> None:
    """Copy a folder's files, as many at a time as there are processors."""
    target.mkdir()
    names = "\0".join(str(path) for path in source.iterdir())
    lanes = str(len(os.sched_getaffinity(0)))
    subprocess.run(["xargs", "-0", "-n1", "-P", lanes, "cp", "-t", target], input=names.encode(), check=True)


def one_round(root: Path, copies: DiskCopies, versions: list[VersionRecord], times: Times) -> None:
    """Make copies in each of the ways that there are, and delete them."""
    full, second, third = versions
    times.take("cp", lambda: copied_by_cp(root / full.path, root / "by-cp"))
    shutil.rmtree(root / "by-cp")

    def make(what: str, source: Copy | VersionRecord, delta: VersionRecord) -> Copy:
        order = MakeCopy(source=source, deltas=(delta,))
        return times.take(what, lambda: copies._write(order, Event()))

    one = make("from the full version", full, second)
    other = make("from a copy", one, third)
    for copy in (one, other):
        copies._discard(copy)


def main() -> None:
    """Read the command line, and print seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm/refitd-copies"))  # noqa: S108 - made anew, or an error
    parser.add_argument("--megabytes", type=int, default=2944)
    parser.add_argument("--tensors", type=int, default=338)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    root: Path = options.root
    root.mkdir()  # an error where it is there: it is deleted at the end
    try:
        (root / SERVICE_FOLDER).mkdir()
        versions = published(root, options.megabytes, options.tensors, options.share)
        files = list((root / versions[0].path).iterdir())
        size = sum(path.stat().st_size for path in files)
        print(
            f"{size:,} bytes in {len(files)} files, {options.share:.1%} changed, "
            f"{len(os.sched_getaffinity(0))} processors",
            flush=True,
        )
        copies, times = DiskCopies(root), Times()
        for _ in range(options.rounds):
            one_round(root, copies, versions, times)
        times.show(beside="cp")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
