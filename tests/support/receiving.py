"""Receivers of a transfer, each a real process on a test's root."""

import os
import signal
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from refitd_client.transport import exporter
from refitd_client.transport.child import ChildLostError, GroupChild, OrderFailed, Receive, Received, Reply
from refitd_client.transport.membership import WaitLimit, hear, join_store
from refitd_client.transport.memory import PREFIX, SHARED_MEMORY, ImportedMemory
from refitd_client.transport.offer import GroupTransfer
from refitd_client.transport.offer_file import ExportedTensors, ImportedTensors, make_secret, read_secret
from refitd_client.transport.script import Ready, key
from refitd_client.transport.sending import QUIET
from support.forked_group import forked_members

A, B = NAMES = tuple(f"{letter}{os.getpid()}" for letter in "ab")  # no other test's receivers have these names
SECONDS = 120.0
Weights = dict[str, torch.Tensor]


@dataclass
class Receiving:
    """Receivers on one root. Their processes may have served another root before."""

    root: Path
    receivers: dict[str, GroupChild]
    pool: ThreadPoolExecutor

    def receive(self, name: str, exported: ExportedTensors, within: float = SECONDS) -> Future[Reply]:
        """A receiver begins."""
        folder = self.root / ".refitd" / "receivers" / name
        folder.mkdir(parents=True, exist_ok=True)
        child = self.receivers.setdefault(name, GroupChild("receive", QUIET))
        order = Receive(
            root=str(self.root),
            offer=f"run/{exported.path.name}",
            name=name,
            folder=str(folder),
            within=within,
            on_device=False,
        )
        return self.pool.submit(child.ask, order, within)

    def says_that_it_is_ready(self, name: str, transfer: GroupTransfer) -> None:
        """Wait until a receiver waits for the sender's word."""
        waiting = WaitLimit(SECONDS, lambda: False)
        hear(join_store(transfer.host, transfer.port, waiting), key(transfer.name, "ready", name), Ready, waiting)

    def holds(self, name: str, reply: Reply, wanted: Mapping[str, torch.Tensor]) -> None:
        """What a receiver offers are these weights."""
        assert isinstance(reply, Received), reply
        imported = ImportedTensors(self.root / ".refitd" / "receivers" / name / reply.offer, read_secret(self.root))
        assert imported.is_exported
        there = ImportedMemory().tensors(imported.offer)
        assert all(torch.equal(there[name], tensor) for name, tensor in wanted.items())
        imported.close()


def kill(child: GroupChild | None) -> None:
    assert child is not None
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


def refused(one: "Future[Reply]") -> str:
    """Why a receiver has nothing; a process that had to be ended has nothing either."""
    error = one.exception(SECONDS)
    if isinstance(error, ChildLostError):
        return str(error)
    reply = one.result(SECONDS)
    assert isinstance(reply, OrderFailed), reply
    return reply.reason


@contextmanager
def receiving_processes() -> Generator[tuple[dict[str, GroupChild], ThreadPoolExecutor]]:
    """What a test has killed begins again in the next; beginning all of them for each test would take minutes."""
    receivers = dict[str, GroupChild]()
    with forked_members(), ThreadPoolExecutor(8) as pool:
        yield receivers, pool
        for child in receivers.values():
            child.end()
    for name in NAMES:  # of a receiver that was killed
        for path in SHARED_MEMORY.glob(f"{PREFIX}{name}-*"):
            path.unlink()


@contextmanager
def root_of_offers(root: Path) -> Generator[Path]:
    """A root with a run's folder and a secret, whose offers end with it."""
    (root / ".refitd").mkdir()
    (root / "run").mkdir()
    make_secret(root)
    try:
        yield root
    finally:
        exporter.end(root / "run")
