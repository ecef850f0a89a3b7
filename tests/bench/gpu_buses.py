"""What the buses of two GPUs of one host give: each way alone, both at once, and with digests of that memory beside.

    python tests/bench/gpu_buses.py [--gb 8] [--out FILE]

Each GPU has two processes, as a trainer's rank and an engine's rank have: one copies from the GPU to a file on
/dev/shm, the other copies the same file to the GPU. Threads of the first digest the file meanwhile. Each step copies
twice, in pieces of 64 MiB; gigabytes are of 10^9 bytes a second.
"""

import argparse
import json
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as processes
import xxhash

PIECE = 64 * 2**20
BLOCK = 8 * 2**20
TIMES = 2
BOTH = (0, 1)
STEPS: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [  # from these GPUs, to these GPUs, threads that digest
    ((0,), (), 0), ((), (0,), 0), (BOTH, (), 0), ((), BOTH, 0), ((0,), (0,), 0), (BOTH, BOTH, 0),
    (BOTH, (), 4), (BOTH, (), 8), (BOTH, BOTH, 4), (BOTH, BOTH, 8),
]  # fmt: skip


class Digesting:
    """Threads that digest a file again and again. `done` are the bytes."""

    def __init__(self, data: Any, threads: int) -> None:
        self._data, self._stop, self.done = data, threading.Event(), [0] * threads
        self._threads = [threading.Thread(target=self._work, args=(lane, threads)) for lane in range(threads)]
        for thread in self._threads:
            thread.start()

    def _work(self, lane: int, lanes: int) -> None:
        while not self._stop.is_set():
            for begin in range(lane * BLOCK, len(self._data), lanes * BLOCK):
                if self._stop.is_set():
                    return
                xxhash.xxh3_128_digest(self._data[begin : begin + BLOCK])
                self.done[lane] += BLOCK

    def end(self) -> None:
        """Stop them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()


def copy_all(rank: int, size: int, path: str, comes: bool, together: Any, results: Any) -> None:
    """One process: takes each step that is its own, and waits for the others before and after it."""
    torch.cuda.set_device(rank)
    handle = os.open(path, os.O_RDWR)
    data = np.frombuffer(mmap.mmap(handle, size), np.uint8)
    driver: Any = torch.cuda.cudart()
    if int(driver.cudaHostRegister(data.ctypes.data, size, 0)) != 0:
        raise RuntimeError("the file cannot be registered with the GPU")
    host, there = torch.from_numpy(data), torch.empty(size, dtype=torch.uint8, device="cuda")
    target, source = (host, there) if comes else (there, host)

    def copied() -> float:
        began = time.perf_counter()
        for begin in [*range(0, size, PIECE)] * TIMES:
            target[begin : begin + PIECE].copy_(source[begin : begin + PIECE], non_blocking=True)
        torch.cuda.synchronize()
        return TIMES * size / (time.perf_counter() - began) / 1e9

    copied()
    for number, (from_gpus, to_gpus, threads) in enumerate(STEPS):
        together.wait()
        digesting, began = Digesting(data, threads if comes else 0), time.perf_counter()
        if rank in (from_gpus if comes else to_gpus):
            speed = round(copied(), 1)
            digested = round(sum(digesting.done) / (time.perf_counter() - began) / 1e9, 1)
            results.put((number, f"{'from' if comes else 'to'} GPU {rank}", speed, digested))
        together.wait()
        digesting.end()
    together.wait()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0, help="GiB of each GPU's file")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    size = int(options.gb * 2**30) // PIECE * PIECE
    context = processes.get_context("spawn")
    together, results = context.Barrier(4), context.SimpleQueue()
    paths = [f"/dev/shm/refitd-buses-{os.getpid()}-{rank}" for rank in BOTH]  # noqa: S108 - a file of its own, of tmpfs
    try:
        for path in paths:
            Path(path).touch()
            os.truncate(path, size)
        jobs = [(rank, size, paths[rank], comes, together, results) for rank in BOTH for comes in (True, False)]
        workers = [context.Process(target=copy_all, args=job) for job in jobs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)
    found: list[dict[str, Any]] = [
        {"from GPUs": list(from_gpus), "to GPUs": list(to_gpus), "threads that digest": threads, "GB/s": {}}
        for from_gpus, to_gpus, threads in STEPS
    ]
    while not results.empty():
        number, what, speed, digested = results.get()
        found[number]["GB/s"][what] = speed
        if digested:
            found[number]["GB/s"][f"digests beside {what}"] = digested
    for each in found:
        print(json.dumps(each))
    if options.out is not None:
        options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "steps": found}, indent=1))


if __name__ == "__main__":
    main()
