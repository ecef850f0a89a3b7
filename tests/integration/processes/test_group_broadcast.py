"""Broadcasts over a real Gloo group of a process and another one, over several connections at once."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from refitd_client.transport.group.membership import BroadcastGroup, WaitLimit, join_store, open_store
from refitd_client.transport.group.transfer import SENDER, Go

BLOCK = 2**16
LOOPBACK = "127.0.0.1"


def weights() -> torch.Tensor:
    """More blocks than are under way at a time, the last one short."""
    return torch.randint(0, 256, (50 * BLOCK + 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def blocks_of(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(BLOCK))


def receive(port: int, go: Go, parent: Connection) -> None:
    """What the other process does: whether it has all bytes where they belong, after each of two transfers."""
    waiting = WaitLimit(60.0, lambda: False)
    store = join_store(LOOPBACK, port, waiting)
    parent.send("is there")  # a group waits for its members for a shorter time than a process may take to begin
    group = BroadcastGroup("gloo", store, go, 1, LOOPBACK, waiting)
    for _ in range(2):
        flat = torch.zeros_like(weights())
        arrived: list[int] = []
        group.broadcast(blocks_of(flat), waiting, arrived.append)
        parent.send((torch.equal(flat, weights()), arrived))
    group.close()


@pytest.mark.parametrize("streams", [1, 4])
def test_blocks_that_go_over_several_connections_arrive_each_in_its_place_and_are_told_of_in_turn(streams: int) -> None:
    store, port = open_store(LOOPBACK)
    go = Go(group=1, ranks={"other": 1}, streams=streams)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=receive, args=(port, go, theirs))
    other.start()
    try:
        assert ours.recv() == "is there"
        waiting = WaitLimit(60.0, lambda: False)
        group = BroadcastGroup("gloo", store, go, SENDER, LOOPBACK, waiting)
        for _ in range(2):
            group.broadcast(blocks_of(weights()), waiting)
            assert ours.poll(60.0)
            assert ours.recv() == (True, list(range(51)))
        group.close()
    finally:
        other.join(30)
        other.kill()
