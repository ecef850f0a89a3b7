"""The process that sends for one trainer process: begun with the first transfer, and ended with the publisher.

The trainer's own process computes nothing for a transfer but fingerprints, which the files need as well. Tensors are
sent from where they lie, on a GPU or in `SharedTensors`. Tensors that only this process can read, and what is published
in another dtype or order than it has, are copied first.
"""

import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from refitd_client.transport.child import (
    ChildLostError,
    GroupChild,
    Open,
    Opened,
    Order,
    OrderFailed,
    Reply,
    Send,
    TransferSent,
)
from refitd_client.transport.choice import Destination, TrainerPlace
from refitd_client.transport.device import uuid_of
from refitd_client.transport.memory import (
    PREFIX,
    SHARED_MEMORY,
    NotSharedError,
    SharedTensors,
    boot_id,
    host_name,
    own_address,
    place_of,
)
from refitd_client.transport.offer import DevicePlace, GroupTransfer, OfferLayout, side_by_side
from refitd_client.transport.script import Backend, ShardTable
from refitd_client.write.content import Content, WeightsOfRanks

SEND_SECONDS = 110.0  # for a transfer, from the notice to the last receiver's word
JOIN_SECONDS = 60.0  # of them, in which receivers are to be ready: the first time each begins a process
BEGIN_SECONDS = 60.0
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch logs a warning for each time-out of a wait that goes on
# SGLang sets it for its processes; members of one group that differ in it fail in their first broadcast.
NCCL = {"NCCL_CUMEM_ENABLE": "0"}
_ONE_TENSOR = "copies"


class NoTransferError(Exception):
    """Why nothing can be sent, as a sentence."""


class TensorSender:
    """The process of one trainer process, and memory for copies. Not for several threads at a time."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Begin nothing. `owner`: tells this sender from others of the run. Shared memory that a killed one has left is
        removed.
        """
        self._owner = hashlib.sha256(f"{folder}\0{owner}".encode()).hexdigest()[:16]
        self._child: GroupChild | None = None
        self._device = ""
        self._memory: Any = None
        self._shared: SharedTensors | None = None
        self._opened: tuple[str, int, int] | None = None

    def memory(self, nbytes: int, place: Any) -> Any:
        """Memory of so many bytes, which no process reads any more: the same as before where it has the size. `place`:
        torch's device: a GPU, or the host, where it is shared memory. Returns a one-dimensional tensor of bytes on that
        device.
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
            self._shared = SharedTensors({_ONE_TENSOR: ("U8", (nbytes,))}, owner=f"{self._owner}-")
            self._memory = self._shared.tensors[_ONE_TENSOR]
        return self._memory

    def sharable(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same tensors, in memory that the process can read: on a GPU as they are, else in shared memory."""
        if all(is_sharable(tensor) for tensor in tensors.values()):
            return tensors
        torch: Any = sys.modules["torch"]
        offsets, nbytes = side_by_side(tensor.nbytes for tensor in tensors.values())
        memory = self.memory(max(nbytes, 1), torch.device("cpu"))
        copies: dict[str, Any] = {}
        with torch.no_grad():
            for at, (name, tensor) in zip(offsets, tensors.items(), strict=True):
                copies[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
                copies[name].copy_(tensor)
        return copies

    def open(self, to: Destination, layout: OfferLayout, senders: int = 1) -> GroupTransfer:
        """Begin a transfer as its first sender: the one that has the store. `layout`: where what this one sends lies.
        Raises NoTransferError: the process cannot be begun, or the service's host cannot be reached.
        """
        try:
            host = own_address(to.service_host)
        except OSError as error:
            raise NoTransferError(f"the service's host {to.service_host!r} cannot be reached: {error}") from error
        child = self._begun(layout)
        known = self._opened
        if known is None or known[:2] != (host, child.begun) or not child.is_running:
            reply = _asked(child, Open(host), BEGIN_SECONDS)
            if not isinstance(reply, Opened):
                raise NoTransferError("its store was not opened")
            known = self._opened = host, child.begun, reply.port
        return GroupTransfer(
            name=secrets.token_hex(8),
            backend=to.backend,
            host=host,
            port=known[2],
            receivers=to.receivers,
            senders=senders,
        )

    def send(
        self,
        transfer: GroupTransfer,
        layout: OfferLayout,
        stop: threading.Event,
        *,
        number: int = 0,
        table: ShardTable | None = None,
    ) -> TransferSent:
        """Send, and wait for what the receivers say. Nothing of it must change before this returns or raises. `layout`:
        where what this one sends lies, in pieces. `table`: what the first sender plans from. Raises NoTransferError:
        nothing has arrived, or it is not known what has.
        """
        order = Send(
            transfer=transfer, number=number, layout=layout, table=table, within=SEND_SECONDS, join=JOIN_SECONDS
        )
        reply = _asked(self._begun(layout), order, SEND_SECONDS, stop)
        if isinstance(reply, TransferSent):
            return reply
        raise NoTransferError("its process has said something else")

    def close(self) -> None:
        child, self._child, self._opened = self._child, None, None
        if child is not None:
            child.end()
        self._free()

    def _begun(self, layout: OfferLayout) -> GroupChild:
        """The process, which sees only the GPU that the tensors are on. Raises NoTransferError: they are on several."""
        devices = sorted({each.place.device for each in layout.tensors if isinstance(each.place, DevicePlace)})
        if len(devices) > 1:
            raise NoTransferError(f"the tensors are on several devices ({', '.join(devices)})")
        seen = devices[0] if devices else ""
        if self._child is None or self._device != seen:
            if self._child is not None:
                self._child.end()
            self._child = GroupChild("send", QUIET | NCCL | ({"CUDA_VISIBLE_DEVICES": seen} if seen else {}))
            self._device, self._opened = seen, None
        return self._child

    def _free(self) -> None:
        self._memory = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None


def _asked(child: GroupChild, order: Order, within: float, stop: threading.Event | None = None) -> Reply:
    """The reply to an order. Raises NoTransferError where there is none, or the order was not carried out."""
    try:
        reply = child.ask(order, within, stop)
    except ChildLostError as error:
        raise NoTransferError(str(error)) from error
    if isinstance(reply, OrderFailed):
        raise NoTransferError(reply.reason)
    return reply


class Sending:
    """A transfer under way, in a thread of its own. `finish` ends it."""

    def __init__(self, send: Callable[[threading.Event], TransferSent]) -> None:
        """Begin: `send` sends until what it is given is set. It raises NoTransferError."""
        self._stop, self._result = threading.Event(), list[TransferSent | NoTransferError]()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(send,), name="refitd-sending", daemon=True)
        self._thread.start()

    def is_sent(self) -> bool:
        """Whether all has been sent, so that the tensors are read no more. Waits for that, until `answered` is called:
        a receiver that never comes is waited for longer than engines take to refuse.
        """
        self._news.wait()
        return bool(self._result) and isinstance(self._result[0], TransferSent)

    def answered(self) -> None:
        """End the wait of `is_sent`, now or later."""
        self._news.set()

    def finish(self) -> TransferSent | NoTransferError:
        """What has come of it. It does not wait for receivers any more: they have come, or no engine wants it."""
        self._stop.set()
        self._thread.join()
        return self._result[0]

    def _run(self, send: Callable[[threading.Event], TransferSent]) -> None:
        try:
            self._result.append(send(self._stop))
        except NoTransferError as error:
            self._result.append(error)
        except BaseException as error:  # whatever it is, `finish` says it
            self._result.append(NoTransferError(f"{type(error).__name__}: {error}"))
        finally:
            self._news.set()


def is_sharable(tensor: Any) -> bool:
    """Whether another process can read a tensor where it is."""
    if tensor.device.type == "cuda":
        return True
    try:
        place_of(tensor)
    except NotSharedError:
        return False
    return True


def available() -> frozenset[Backend]:
    """The backends that this process's torch has, none where it has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return frozenset()
    found: set[Backend] = {"gloo"} if torch.distributed.is_gloo_available() else set()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found.add("nccl")
    return frozenset(found)


def place_of_process(tensors: Sequence[Any], *, count: int, is_rank: bool = False) -> TrainerPlace:
    """Find where a process has its tensors. `count`: how many it publishes, of torch and others."""
    return TrainerPlace(
        host=host_name(),
        boot=boot_id(),
        devices=frozenset(uuid_of(device) for device in {each.device for each in tensors} if device.type == "cuda"),
        shared=not is_rank and 0 < len(tensors) == count and all(is_sharable(each) for each in tensors),
        backends=available() if tensors or is_rank else frozenset(),
        is_rank=is_rank,
    )


def places_of(weights: Any) -> Sequence[TrainerPlace] | None:
    """Where the tensors are, before names and dtypes are worked out; None for a folder."""
    if isinstance(weights, Content):
        return weights.weights.places if isinstance(weights.weights, WeightsOfRanks) else None
    if isinstance(weights, (str, os.PathLike)):
        return None
    tensors = cast("Mapping[str, Any]", weights) if isinstance(weights, Mapping) else dict(weights.named_parameters())
    torch = sys.modules.get("torch")
    mine = [each for each in tensors.values() if torch is not None and isinstance(each, torch.Tensor)]
    return [place_of_process(mine, count=len(tensors))]
