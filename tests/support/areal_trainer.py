"""A trainer's rank 0 in a process of its own, which makes a group and broadcasts as AReaL 1.0's FSDP engine does."""

import os
import signal
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from support.forked import forking

GROUP = "update_weight_group"
LOOPBACK = "127.0.0.1"


class TrainerRank:
    """The process. Orders are carried out in turn; `done` waits for one. With `nccl` it is on the first GPU."""

    def __init__(self, backend: str = "gloo") -> None:
        with socket.create_server((LOOPBACK, 0)) as free:
            self.port = int(free.getsockname()[1])
        context = forking()
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_trainer, args=(self.port, backend, theirs))
        self.process.start()
        theirs.close()

    def make(self, ranks: int, group: str = GROUP) -> None:
        """Begin to make the group of itself and so many engine ranks."""
        self._line.send(("make", group, ranks + 1))

    def send(self, tensors: Mapping[str, Any]) -> None:
        """Begin to broadcast tensors, in turn."""
        self._line.send(("send", list(tensors.values())))

    def done(self, within: float = 120.0) -> str:
        """Wait for an order; "" or what went wrong."""
        assert self._line.poll(within), "the trainer has not answered"
        return self._line.recv()

    def stop(self) -> None:
        """Let the process be silent from now on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()


@contextmanager
def trainer_rank(backend: str = "gloo") -> Generator[TrainerRank]:
    """A trainer, killed at the end."""
    trainer = TrainerRank(backend)
    try:
        yield trainer
    finally:
        trainer.kill()


def named(tensors: Mapping[str, Any], group: str = GROUP) -> dict[str, Any]:
    """AReaL's call for a bucket."""
    return {
        "names": list(tensors),
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
        "group_name": group,
        "abort_all_requests": True,
    }


def announced(port: int, offset: int, ranks: int, group: str = GROUP, backend: str = "gloo") -> dict[str, Any]:
    """AReaL's call for a group."""
    return {
        "master_address": LOOPBACK,
        "master_port": str(port),
        "rank_offset": offset,
        "world_size": ranks + 1,
        "backend": backend,
        "group_name": group,
    }


def _trainer(port: int, backend: str, line: Connection) -> None:
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}  # as AReaL's launchers do
    import torch.distributed as distributed

    dist: Any = distributed
    made: Any = None
    device = "cpu" if backend == "gloo" else "cuda:0"
    while True:
        try:
            what, *given = line.recv()
        except EOFError:
            return
        try:
            if what == "make":
                made = _made(port, backend, *given)
            else:
                tensors = [each.to(device) for each in given[0]]
                for work in [dist.broadcast(each, src=0, group=made, async_op=True) for each in tensors]:
                    work.wait()
            line.send("")
        except RuntimeError as error:
            line.send(str(error))


def _made(port: int, backend: str, name: str, size: int) -> Any:
    """As `areal.engine.core.distributed.init_custom_process_group`."""
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    timeout = timedelta(seconds=120)
    store, rank, size = next(c10d.rendezvous(f"tcp://{LOOPBACK}:{port}", 0, size, timeout=timeout))
    store.set_timeout(timeout)
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), store, group_name=name, timeout=timeout, group_desc=name
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group
