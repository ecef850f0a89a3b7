"""`python -m support.rogue_stock deliver FD`: a sender process for a stock engine that does what ROGUE_STOCK says.

absent     it never joins the group
silent     it joins, and sends nothing
early      it dies before it sends
middle     it dies after the first bucket
late       it dies when it has sent all
short      it sends ten bytes of a bucket
other      it flips one bit
forged     it says what the engine is to hold, without the root's secret
"""

import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from refitd_client.transport.group import stock_sender, stock_words
from refitd_client.transport.group.child import serve
from refitd_client.transport.group.stock_sender import DeliveryProcess

VARIABLE = "ROGUE_STOCK"
REPORT_TO = "ROGUE_STOCK_PORT"
"""The port that a process which hangs connects to, so that a test knows."""
BUCKET_BYTES = 64 * 2**10  # so that a small model has several


def small_buckets() -> None:
    """Have this process cut small buckets: the service's and the sender's have to do it alike."""
    stock_words.buckets.__defaults__ = (BUCKET_BYTES,)


@dataclasses.dataclass
class RogueGroup:
    """A process group that does something else with a broadcast."""

    group: Any
    sends: Callable[[Any, torch.Tensor, Any], Any]

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self.sends(self.group, tensors[0], options)


def _hang(*_: Any, **__: Any) -> Any:
    if port := os.environ.get(REPORT_TO):
        socket.create_connection(("127.0.0.1", int(port)))
    threading.Event().wait()


def _die(*_: Any, **__: Any) -> Any:
    os._exit(1)


class _Once:
    """Sends one bucket, and dies with the next."""

    done = False

    def __call__(self, group: Any, tensor: torch.Tensor, options: Any) -> Any:
        if self.done:
            os._exit(1)
        self.done = True
        return group.broadcast([tensor], options)


def _short(group: Any, tensor: torch.Tensor, options: Any) -> Any:
    return group.broadcast([tensor[:10].clone()], options)


def _other(group: Any, tensor: torch.Tensor, options: Any) -> Any:
    tensor[5] ^= 1
    return group.broadcast([tensor], options)


SENDS: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "silent": _hang,
    "early": _die,
    "middle": _Once(),
    "short": _short,
    "other": _other,
}


def turn_rogue(fault: str) -> None:
    """Do what a fault says from now on."""
    made, broadcast = stock_sender.make_group, stock_sender._broadcast
    if fault == "absent":
        stock_sender.make_group = _hang
    elif fault == "late":

        def and_die(*args: Any) -> None:
            broadcast(*args)
            os._exit(1)

        stock_sender._broadcast = and_die
    elif fault == "forged":
        stock_sender.code_of = lambda *_: "0" * 64
    elif fault in SENDS:
        stock_sender.make_group = lambda *args: RogueGroup(made(*args), SENDS[fault])


if __name__ == "__main__":
    small_buckets()
    turn_rogue(os.environ.get(VARIABLE, ""))
    process = DeliveryProcess()
    serve(socket.socket(fileno=int(sys.argv[2])), process.work, process.end)
