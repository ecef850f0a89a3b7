"""The trainer's sender processes for engines without refitd inside: one for each engine, kept from step to step."""

import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from refitd_client.transport.group.child import (
    ChildLostError,
    GroupChild,
    Open,
    Opened,
    OrderFailed,
    Send,
    TransferSent,
)
from refitd_client.transport.group.host import own_address
from refitd_client.transport.group.sending import (
    BEGIN_SECONDS,
    JOIN_SECONDS,
    NCCL,
    QUIET,
    SEND_SECONDS,
    Destination,
    NoTransferError,
    device_of,
)
from refitd_client.transport.ipc.offer import StockTransfer


class StockSenders:
    """The sender processes of one publisher, by the URLs of engines. Not for several threads at a time."""

    def __init__(self) -> None:
        self._children: dict[str, GroupChild] = {}
        self._ports: dict[str, int] = {}
        self._began: tuple[str, str, str] | None = None

    def begin(self, to: Destination, tensors: Mapping[str, Any]) -> StockTransfer:
        """A transfer to the destination's engines, of tensors that `GroupSender.sharable` has returned.

        Raises:
            NoTransferError: a process cannot be begun, or the tensors cannot be sent so.
        """
        device = device_of(tensors, to.backend)
        try:
            host = own_address(to.service_host)
        except OSError as error:
            raise NoTransferError(f"the service's host {to.service_host!r} cannot be reached: {error}") from error
        if self._began != (to.backend, host, device):
            self.close()
            self._began = (to.backend, host, device)
        for engine in self._children.keys() - set(to.engines):
            self._end(engine)
        seen = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        new = [engine for engine in to.engines if not self._stands(engine)]
        for engine in new:
            self._end(engine)
            self._children[engine] = GroupChild("deliver", QUIET | NCCL | seen)
        if new:
            with ThreadPoolExecutor(len(new)) as pool:
                ports = pool.map(_open, [self._children[engine] for engine in new], repeat(host))
                self._ports |= dict(zip(new, ports, strict=True))
        ports = {engine: self._ports[engine] for engine in to.engines}
        return StockTransfer(name=secrets.token_hex(16), backend=to.backend, host=host, ports=ports)

    def send(self, root: Path, offer: str, stop: threading.Event) -> TransferSent:
        """Send an offer's tensors to all engines, and wait for what becomes of that.

        Args:
            root: the folder beneath which the offer's file is.
            offer: its path.
            stop: ends the wait.

        Raises:
            NoTransferError: no engine has received it.
        """
        order = Send(root=str(root), offer=offer, within=SEND_SECONDS, join=JOIN_SECONDS)
        with ThreadPoolExecutor(len(self._children)) as pool:
            asked = {url: pool.submit(child.ask, order, SEND_SECONDS, stop) for url, child in self._children.items()}
        refused: dict[str, str] = {}
        for url, each in asked.items():
            match each.exception() or each.result():
                case TransferSent(refused=said):
                    refused |= said
                case OrderFailed(reason):
                    refused[url] = reason
                case other:
                    refused[url] = str(other)
            if refused[url]:
                self._end(url)  # whatever it waits for
        if all(refused.values()):
            raise NoTransferError("; ".join(f"{url}: {reason}" for url, reason in refused.items())[:1000])
        return TransferSent(refused=refused, ms={})

    def close(self) -> None:
        """End all processes, also in the middle of a transfer: engines that wait for one are free then."""
        for engine in [*self._children]:
            self._end(engine)
        self._began = None

    def _stands(self, engine: str) -> bool:
        """Whether its process is there, and is the one that has the port."""
        child = self._children.get(engine)
        return child is not None and child.is_running and child.begun == 1

    def _end(self, engine: str) -> None:
        child = self._children.pop(engine, None)
        self._ports.pop(engine, None)
        if child is not None:
            child.end()


def _open(child: GroupChild, host: str) -> int:
    try:
        reply = child.ask(Open(host), BEGIN_SECONDS)
    except ChildLostError as error:
        raise NoTransferError(str(error)) from error
    if not isinstance(reply, Opened):
        raise NoTransferError(reply.reason if isinstance(reply, OrderFailed) else "its port was not opened")
    return reply.port
