"""Memory during a benchmark: of the GPU, and of the process that holds the weights; and the bus between the two."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from timed import spread, timed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it shows that it runs, and no figures


def pinned_copy(nbytes: int) -> dict[str, float]:
    """Host to device, of memory that is pinned: the bus."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)

    def copy() -> None:
        device.copy_(host, non_blocking=True)
        torch.zeros(1, device=DEVICE).item()

    return spread([timed(copy)[0] for _ in range(7)][2:])


def gpu_free(*, empty: bool = True) -> float:
    """MiB that nobody has taken, once this process has let go of what it does not use."""
    if DEVICE == "cpu":
        return 0.0
    if empty:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**20


class Memory:
    """How much of the GPU is used beside what was used at first, at its highest, as seen from this process."""

    def __init__(self) -> None:
        self.highest = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        free, stop = gpu_free(), threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                self.highest = max(self.highest, free - gpu_free(empty=False))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def scheduler_of(pid: int) -> psutil.Process:
    """The process that holds the weights."""
    for child in psutil.Process(pid).children(recursive=True):
        if "scheduler" in " ".join([*child.cmdline(), child.name()]):
            return child
    raise RuntimeError(f"the server {pid} has no scheduler")


def host_memory(process: psutil.Process) -> dict[str, float]:
    """Anonymous memory in MiB, descriptors and mappings."""
    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    anonymous = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))
    maps = len(Path(f"/proc/{process.pid}/maps").read_text().splitlines())
    return {"anonymous MiB": round(anonymous / 1024, 1), "descriptors": process.num_fds(), "mappings": maps}
