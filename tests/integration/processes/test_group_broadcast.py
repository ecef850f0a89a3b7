"""Broadcasts over a real Gloo group of a process and another one, over several connections at once."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from refitd_client.transport.membership import BroadcastGroup, WaitLimit, join_store, open_store
from refitd_client.transport.script import SENDER
from support.broadcasting import broadcast

BLOCK = 2**16
LOOPBACK = "127.0.0.1"


def weights() -> torch.Tensor:
    """More blocks than are under way at a time, the last one short."""
    return torch.randint(0, 256, (50 * BLOCK + 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def blocks_of(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(BLOCK))


def receive(port: int, streams: int, parent: Connection) -> None:
    """What the other process does: whether it has all bytes where they belong, after each of two transfers."""
    waiting = WaitLimit(60.0, lambda: False)
    store = join_store(LOOPBACK, port, waiting)
    parent.send("is there")  # a group waits for its members for a shorter time than a process may take to begin
    group = BroadcastGroup("gloo", store, 1, 1, 2, LOOPBACK, streams, waiting)
    for _ in range(2):
        flat = torch.zeros_like(weights())
        broadcast(group, blocks_of(flat), waiting)
        parent.send(torch.equal(flat, weights()))
    group.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_blocks_that_go_over_several_connections_arrive_each_in_its_place(streams: int) -> None:
    store, port = open_store(LOOPBACK)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=receive, args=(port, streams, theirs))
    other.start()
    try:
        assert ours.recv() == "is there"
        waiting = WaitLimit(60.0, lambda: False)
        group = BroadcastGroup("gloo", store, 1, SENDER, 2, LOOPBACK, streams, waiting)
        for _ in range(2):
            broadcast(group, blocks_of(weights()), waiting)
            assert ours.poll(60.0)
            assert ours.recv() is True
        group.close()
    finally:
        other.join(30)
        other.kill()
