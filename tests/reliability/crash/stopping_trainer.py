"""Trainers in processes of their own. Each publishes one step, with tensors as those of a GPU, into a slot if there is
one, and stops for good at an effect: a change of the file system or a copy to a file. That one is half done.

For each line on stdin, a step and the number of an effect (0: none), one is forked; lines on stdout say how it goes:

    born PID
    waits             for a line: before its first copy, and when all has been written, before it takes `.progress` away
    stopped NAME      it stands at that effect, and waits to be killed; its other threads go on
    done              it has published
    ended STATUS

It is the publisher as it is, on host memory in the place of a GPU (`support.host_gpu`): publishers write `.progress`
where tensors come from one.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

from refitd_client import WeightPublisher
from refitd_client.write import cuda_driver
from support import durable_effects
from support.following import SHARD
from support.host_gpu import trainer_gpu
from support.mini_sglang import tiny_weights


class Stop:
    """Stops at effect number `at`; 0 for never."""

    def __init__(self, at: int) -> None:
        self._at, self._count, self._turn = at, 0, Lock()
        self._waited: set[str] = set()

    def effect(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        """An effect that is about to happen, and what does half of it."""
        with self._turn:
            self._count += 1
            is_end = self._count == self._at
        if is_end:
            half()
            print(f"stopped {name}", flush=True)
            Event().wait()

    def change(self, _: int, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """See `durable_effects.on_each_effect`."""
        target, data, *offset = args if name in {"write", "write_at", "overwrite"} else (None, b"")
        if name == "remove_file":
            self._wait_before(name)
        halves = {"write", "overwrite"}  # a word of `.progress` is one write of 8 bytes: it is whole
        self.effect(name, lambda: original(target, data[: len(data) // 2], *offset) if name in halves else None)

    def _wait_before(self, name: str) -> None:
        if name not in self._waited:
            self._waited.add(name)
            print("waits", flush=True)
            os.read(0, 1)

    def copy(self, _: str, target: int, source: int, count: int, __: object) -> None:
        """In the place of the driver's."""
        self._wait_before("copy")
        self.effect("copy", lambda: cuda_driver.copy_here(target, source, count // 2))
        cuda_driver.copy_here(target, source, count)


def publish(root: Path, step: int, at: int) -> None:
    """Be one of them."""
    print(f"born {os.getpid()}", flush=True)
    stop = Stop(at)
    with pytest.MonkeyPatch.context() as patch:
        trainer_gpu(patch)
        patch.setattr(cuda_driver, "copy", stop.copy)
        patch.setattr(cuda_driver, "has_driver", lambda: True)
        durable_effects.on_each_effect(stop.change)
        with WeightPublisher(root, "run", fingerprints=True, max_shard_bytes=SHARD) as publisher:
            publisher.publish(tiny_weights(step), step=step)
    print("done", flush=True)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            publish(Path(sys.argv[1]), *map(int, line.split()))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
