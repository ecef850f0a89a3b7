"""Ranks of a trainer: real processes with a gloo group, forked from a server that has imported torch once."""

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.forked import forking

_LIMIT = 60.0  # seconds for all ranks together


def run_ranks(size: int, folder: Path, job: Callable[..., Any], *args: Any, limit: float = _LIMIT) -> list[Any]:
    """Run `job(rank, size, *args)` on each rank and return what each returned, or the exception, None of a dead one.

    `limit` are seconds for all of them.
    """
    context = forking()
    store = folder / f"store-{os.urandom(4).hex()}"
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, store, pipes[rank][1], job, args)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for _, child in pipes:
            child.close()
        ends = time.monotonic() + limit
        return [_result(parent, ends) for parent, _ in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _result(pipe: Connection, ends: float) -> Any:
    if not wait([pipe], max(0.0, ends - time.monotonic())):
        return TimeoutError("no result in time")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _rank(rank: int, size: int, store: Path, pipe: Connection, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        result = job(rank, size, *args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        result = error
    pipe.send(result)
    os._exit(0)  # without destroying groups that may wait for a rank that is dead


def attempted(call: Callable[[], object]) -> Exception | None:
    """What a call raised, for a job that is to go on."""
    try:
        call()
    except Exception as error:
        return error
    return None
