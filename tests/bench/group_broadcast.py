"""Broadcasts over Gloo between two processes on this machine, beside raw sockets and a broadcast for each parameter.

The bytes are those of a model in memory of both processes. Every way is tried once before, then all in turns, so that
what else the machine does falls on all of them alike.
"""

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from figures import Figure, spread

from refitd_client.transport.membership import BroadcastGroup, WaitLimit, join_store, open_store
from refitd_client.transport.script import BLOCK_BYTES, MOST_STREAMS, SENDER
from support.broadcasting import broadcast

BYTES = 2**30
ROUNDS = 7
PARAMETERS = 290  # as a model of 1.5 B parameters has
LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its types leave out groups without a default group
_WAYS = ("blocks", "parameters", "one socket", "sockets")


def group_broadcast(_: Path) -> list[Figure]:
    """Seconds of each way, and what was promised of their ratios."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_other, args=(theirs,))
    other.start()
    try:
        seconds = _measured(ours)
    finally:
        other.join(30)
        other.kill()
    best = [min(one, several) for one, several in zip(seconds["one socket"], seconds["sockets"], strict=True)]
    rates = {f"{way}, GB/s": spread([BYTES / each / 1e9 for each in seconds[way]]) for way in _WAYS}
    detail = {"bytes": BYTES, "connections": MOST_STREAMS} | rates
    return [
        Figure(
            name="gloo: blocks beside raw sockets between the same processes, p50",
            measured=_ratio(seconds["blocks"], best),
            unit="x the time",
            limit=round(1 / 0.7, 3),
            detail=detail,
        ),
        Figure(
            name="gloo: blocks beside a broadcast for each parameter, p50",
            measured=_ratio(seconds["blocks"], seconds["parameters"]),
            unit="x the time",
            limit=0.6,
            detail={"parameters": PARAMETERS},
        ),
    ]


def _ratio(these: list[float], those: list[float]) -> float:
    ratios = sorted(one / other for one, other in zip(these, those, strict=True))
    return round(ratios[len(ratios) // 2], 3)


def _measured(other: Connection) -> dict[str, list[float]]:
    store, port = open_store(LOOPBACK)
    other.send(port)
    other.recv()
    ways = _Ways(store, SENDER, torch.ones(BYTES, dtype=torch.uint8), other)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    for turn in range(ROUNDS + 1):
        for way in _WAYS:
            ways.by[way]()
            if turn:
                seconds[way].append(other.recv())
            else:
                other.recv()
    return seconds


def _other(parent: Connection) -> None:
    waiting = WaitLimit(600.0, lambda: False)
    store = join_store(LOOPBACK, parent.recv(), waiting)
    parent.send("is there")
    ways = _Ways(store, SENDER + 1, torch.zeros(BYTES, dtype=torch.uint8), parent)
    for _ in range(ROUNDS + 1):
        for way in _WAYS:
            parent.send(ways.by[way]())


class _Ways:
    """Each way, as one of the two processes has it. They return the seconds from its begin there to its end."""

    def __init__(self, store: Any, rank: int, flat: torch.Tensor, other: Connection) -> None:
        self._rank, self._flat, self._pipe = rank, flat, other
        self._waiting = WaitLimit(600.0, lambda: False)
        self._group = BroadcastGroup("gloo", store, 1, rank, 2, LOOPBACK, MOST_STREAMS, self._waiting)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=600)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        self._plain = dist.ProcessGroupGloo(dist.PrefixStore("plain", store), rank, 2, options)
        self.by: dict[str, Callable[[], float]] = {
            "blocks": self._blocks,
            "parameters": self._parameters,
            "one socket": lambda: self._sockets(1),
            "sockets": lambda: self._sockets(MOST_STREAMS),
        }

    def _both(self) -> float:
        """Begin together; when that was."""
        self._plain.barrier().wait()
        return time.perf_counter()

    def _blocks(self) -> float:
        began = self._both()
        broadcast(self._group, self._flat.split(BLOCK_BYTES["gloo"]), self._waiting)
        return time.perf_counter() - began

    def _parameters(self) -> float:
        """As trainers do: one after the other, each awaited."""
        began, options = self._both(), dist.BroadcastOptions()
        options.rootRank = SENDER
        for parameter in self._flat.chunk(PARAMETERS):
            self._plain.broadcast([parameter], options).wait()
        return time.perf_counter() - began

    def _sockets(self, connections: int) -> float:
        parts = [memoryview(part.numpy()) for part in self._flat.chunk(connections)]
        if self._rank == SENDER:
            port = self._pipe.recv()
            peers = [socket.create_connection((LOOPBACK, port)) for _ in parts]
        else:
            with socket.create_server((LOOPBACK, 0), backlog=connections) as listener:
                self._pipe.send(listener.getsockname()[1])
                peers = [listener.accept()[0] for _ in parts]
        began = self._both()
        work = _send if self._rank == SENDER else _receive
        threads = [threading.Thread(target=work, args=each) for each in zip(peers, parts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def _send(peer: socket.socket, part: memoryview) -> None:
    with peer:
        peer.sendall(part)


def _receive(peer: socket.socket, part: memoryview) -> None:
    with peer:
        at = 0
        while at < len(part):
            at += peer.recv_into(part[at:])
