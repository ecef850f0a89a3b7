"""How long the service takes to write the copy that holds a delta, for engines that take none, beside `cp`.

    PYTHONPATH=tests python tests/bench/copies.py --root DIR [--megabytes 2944] [--tensors 338]

A full version and two deltas of 1 % are published into DIR, which is made for it and deleted at the end. Then a copy is
written anew from the full version, another from that copy, the first is brought up to date in place, and the second is
written over.
"""

import argparse
import shutil
import subprocess
import time
from pathlib import Path
from threading import Event

import numpy as np

from refitd.catalog.record import VersionRecord
from refitd.copies.copy import Copy
from refitd.copies.decide import Write
from refitd.copies.disk import DiskCopies
from refitd_client import WeightPublisher
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.delta import DeltaRules
from support.deltas import RUN, record_of


def published(root: Path, megabytes: int, tensors: int) -> list[VersionRecord]:
    """A full version, and two deltas on it."""
    random, found = np.random.default_rng(0), list[VersionRecord]()
    elements = megabytes * 2**20 // 2 // tensors
    weights = {f"w{number}": random.integers(0, 2**14, elements, dtype=np.uint16) for number in range(tensors)}
    with WeightPublisher(root, RUN, delta_rules=DeltaRules(threshold=0.5), fingerprints=True) as publisher:
        publisher._means.deltas._ask_base = lambda: found[-1].id
        for step in (1, 2, 3):
            named = {name: bits.view(np.float16) for name, bits in weights.items()}
            found.append(record_of(root, publisher.publish(named, step=step, delta="auto")))
            for bits in weights.values():
                bits[random.integers(0, elements, elements // 100)] ^= 1
    return found


def main() -> None:
    """Read the command line, and print seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=2944)
    parser.add_argument("--tensors", type=int, default=338)
    options = parser.parse_args()
    root: Path = options.root
    root.mkdir()  # an error where it is there: it is deleted at the end
    (root / SERVICE_FOLDER).mkdir()
    full, second, third = published(root, options.megabytes, options.tensors)
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(root / full.path), str(root / "by-cp")], check=True)
    print(f"cp: {time.perf_counter() - began:.2f} s")
    shutil.rmtree(root / "by-cp")
    copies = DiskCopies(root)

    def write(what: str, order: Write) -> Copy:
        began = time.perf_counter()
        copy = copies._write(order, Event())
        print(f"{what}: {time.perf_counter() - began:.2f} s", flush=True)
        return copy

    one = write("anew, from the full version", Write(target=second, source=full, deltas=(second,), into=None))
    other = write("anew, from a copy", Write(target=third, source=one, deltas=(third,), into=None))
    write("in place", Write(target=third, source=one, deltas=(third,), into=one))
    write("over a copy, from the full version", Write(target=second, source=full, deltas=(second,), into=other))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
