"""Memory of the GPU during a benchmark."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU it shows that it runs, and no figures


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
