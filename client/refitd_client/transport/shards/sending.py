"""One trainer rank's sender process, and the memory that its shards are copied into before they are sent.

The copy takes as much memory as the rank sends: the published model's size, shared out over the ranks. It is in the
published dtype, so that a trainer with weights in another one sends as well, and the trainer's own tensors are not
read by any other process.
"""

import os
import secrets
import tempfile
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from refitd_client.files.durable import write
from refitd_client.transport.group.child import (
    ChildLostError,
    GroupChild,
    Open,
    Opened,
    OrderFailed,
    SendShard,
    TransferSent,
)
from refitd_client.transport.group.host import own_address
from refitd_client.transport.group.sending import (
    JOIN_SECONDS,
    NCCL,
    QUIET,
    SEND_SECONDS,
    Destination,
    NoTransferError,
)
from refitd_client.transport.ipc import device, shared
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.offer import GroupTransfer, OfferedTensor, OfferLayout
from refitd_client.transport.ipc.shared import PREFIX, SHARED_MEMORY, SharedTensors, boot_id, host_name
from refitd_client.transport.shards.script import ShardTable

_OPEN_SECONDS = 60.0
_GROUP_NAME = "shards"


class ShardSender:
    """The memory and the process of one rank. Not for several threads at a time."""

    def __init__(self, owner: str) -> None:
        """`owner` is no other live sender's: shared memory that a killed one of this name has left is removed."""
        self._owner = owner
        self._child: GroupChild | None = None
        self._device = ""
        self._memory: Any = None
        self._shared: SharedTensors | None = None
        self._opened: tuple[str, int, int] | None = None

    def memory(self, nbytes: int, place: Any) -> Any:
        """Memory of so many bytes, which no process reads any more: the same as before where it has the size.

        Args:
            nbytes: the size.
            place: torch's device: a GPU, or the host, where it is shared memory.

        Returns:
            A one-dimensional tensor of bytes on that device.
        """
        import torch

        if self._memory is not None and (len(self._memory), self._memory.device.type) == (nbytes, place.type):
            return self._memory
        self._free()
        if place.type == "cuda":
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=place)
        else:
            for left in SHARED_MEMORY.glob(f"{PREFIX}{self._owner}-*"):
                left.unlink(missing_ok=True)
            self._shared = SharedTensors({_GROUP_NAME: ("U8", (nbytes,))}, owner=f"{self._owner}-")
            self._memory = self._shared.tensors[_GROUP_NAME]
        return self._memory

    @property
    def staged(self) -> Any:
        """The memory as it is."""
        return self._memory

    def open(self, to: Destination, senders: int) -> GroupTransfer:
        """Begin a transfer as its first sender: the one that has the store.

        Args:
            to: the receivers.
            senders: how many ranks send.

        Raises:
            NoTransferError: the process cannot be begun, or the service's host cannot be reached.
        """
        try:
            host = own_address(to.service_host)
        except OSError as error:
            raise NoTransferError(f"the service's host {to.service_host!r} cannot be reached: {error}") from error
        child = self._begun()
        known = self._opened
        if known is None or known[:2] != (host, child.begun) or not child.is_running:
            try:
                reply = child.ask(Open(host), _OPEN_SECONDS)
            except ChildLostError as error:
                raise NoTransferError(str(error)) from error
            if not isinstance(reply, Opened):
                raise NoTransferError(reply.reason if isinstance(reply, OrderFailed) else "its store was not opened")
            known = self._opened = host, child.begun, reply.port
        return GroupTransfer(
            name=secrets.token_hex(8),
            backend=to.backend,
            host=host,
            port=known[2],
            receivers=to.receivers,
            senders=senders,
        )

    def send(self, transfer: GroupTransfer, number: int, table: ShardTable | None, stop: Event) -> TransferSent:
        """Send what is in the memory. It must not change before this returns or raises.

        Args:
            transfer: the transfer, as the first sender has begun it.
            number: this sender's.
            table: what the first sender plans from.
            stop: ends the wait.

        Raises:
            NoTransferError: nothing has arrived, or it is not known what has.
        """
        child, path = self._begun(), ""
        try:
            if table is not None:
                path = _written(table)
            order = SendShard(
                transfer=transfer,
                number=number,
                layout=self._layout(),
                table=path,
                within=SEND_SECONDS,
                join=JOIN_SECONDS,
            )
            reply = child.ask(order, SEND_SECONDS, stop)
        except ChildLostError as error:
            raise NoTransferError(str(error)) from error
        except OSError as error:
            raise NoTransferError(f"what is to be sent cannot be described: {error}") from error
        finally:
            if path:
                Path(path).unlink(missing_ok=True)
        if isinstance(reply, TransferSent):
            return reply
        raise NoTransferError(reply.reason if isinstance(reply, OrderFailed) else "its process has said something else")

    def close(self) -> None:
        """End the process, and give its memory back."""
        child, self._child, self._opened = self._child, None, None
        if child is not None:
            child.end()
        self._free()

    def _begun(self) -> GroupChild:
        """The process, which sees only the GPU that the memory is on."""
        seen = uuid_of(self._memory.device) if self._memory is not None and self._memory.is_cuda else ""
        if self._child is None or self._device != seen:
            if self._child is not None:
                self._child.end()
            self._child = GroupChild("send", QUIET | NCCL | ({"CUDA_VISIBLE_DEVICES": seen} if seen else {}))
            self._device, self._opened = seen, None
        return self._child

    def _layout(self) -> OfferLayout:
        memory = self._memory
        place = device.place_of(memory) if memory.is_cuda else shared.place_of(memory)
        only = OfferedTensor(_GROUP_NAME, "U8", tuple(memory.shape), place)
        return OfferLayout(host=host_name(), boot=boot_id(), pid=os.getpid(), life="", tensors=(only,))

    def _free(self) -> None:
        self._memory = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _written(table: ShardTable) -> str:
    """A file of this user's alone, for the length of one order: a line to the process has no room for it."""
    fd, path = tempfile.mkstemp(prefix="refitd-shards-")
    try:
        write(fd, msgspec.json.encode(table))
    finally:
        os.close(fd)
    return path
