"""The trainer's sender process: begun with the first transfer, asked for each, ended with the publisher.

The trainer's own process computes nothing for a transfer but the fingerprints of its tensors, which the files need as
well. Tensors that only this process can read are copied into shared memory of the host first.
"""

import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refitd_client.tensors import DTYPES
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
from refitd_client.transport.group.transfer import Backend
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.offer import GroupTransfer
from refitd_client.transport.ipc.shared import NotSharedError, SharedTensors, place_of

SEND_SECONDS = 110.0  # for a transfer, from the notice to the last receiver's word
JOIN_SECONDS = 60.0  # of them, in which receivers are to be ready: the first time each begins a process
BEGIN_SECONDS = 60.0
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch logs a warning for each time-out of a wait that goes on
# SGLang sets it for its processes; members of one group that differ in it fail in their first broadcast.
NCCL = {"NCCL_CUMEM_ENABLE": "0"}


class NoTransferError(Exception):
    """Why nothing can be sent, as a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Whom a version is sent to: the `receivers` by name, through `backend`; `service_host` is the service's. `needs`
    are the digests of what receivers need that do not need everything.
    """

    backend: Backend
    receivers: tuple[str, ...]
    service_host: str
    needs: Mapping[str, str] = field(default_factory=dict[str, str])


class GroupSender:
    """The sender process of one publisher. Not for several threads at a time."""

    def __init__(self) -> None:
        self._child: GroupChild | None = None
        self._began: tuple[str, str, str] | None = None
        self._port = 0
        self._shared: tuple[tuple[Any, ...], SharedTensors] | None = None

    def begin(self, to: Destination, tensors: Mapping[str, Any]) -> GroupTransfer:
        """A transfer that receivers can join, of tensors that `sharable` has returned.

        Raises:
            NoTransferError: the process cannot be begun, or the tensors cannot be sent so.
        """
        device = device_of(tensors, to.backend)
        try:
            host = own_address(to.service_host)
        except OSError as error:
            raise NoTransferError(f"the service's host {to.service_host!r} cannot be reached: {error}") from error
        child = self._child
        if self._began != (to.backend, host, device) or child is None or not child.is_running or child.begun > 1:
            self._open(to.backend, host, device)  # one that was begun again has no store
        return GroupTransfer(
            name=secrets.token_hex(8), backend=to.backend, host=host, port=self._port, receivers=to.receivers
        )

    def sharable(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same tensors, in memory that the process can read: on a GPU as they are, else in shared memory."""
        if all(is_sharable(tensor) for tensor in tensors.values()):
            return tensors
        specs = tuple(
            (name, DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        if self._shared is None or self._shared[0] != specs:
            self._free()
            self._shared = specs, SharedTensors({name: (dtype, shape) for name, dtype, shape in specs})
        torch, copies = sys.modules["torch"], self._shared[1].tensors
        with torch.no_grad():
            for name, tensor in tensors.items():
                copies[name].copy_(tensor)
        return copies

    def send(self, root: Path, offer: str, stop: threading.Event) -> TransferSent:
        """Send an offer's tensors, and wait for what the receivers say. Once `stop` is set it does not wait for them.

        Args:
            root: the folder beneath which the offer's file is.
            offer: its path.
            stop: ends the wait.

        Raises:
            NoTransferError: nothing has arrived, or it is not known what has.
        """
        if self._child is None:
            raise NoTransferError("its process was not begun")
        order = Send(root=str(root), offer=offer, within=SEND_SECONDS, join=JOIN_SECONDS)
        try:
            reply = self._child.ask(order, SEND_SECONDS, stop)
        except ChildLostError as error:
            raise NoTransferError(str(error)) from error
        if isinstance(reply, TransferSent):
            return reply
        raise NoTransferError(reply.reason if isinstance(reply, OrderFailed) else "its process has said something else")

    def close(self) -> None:
        """End the process, and give its memory back."""
        child, self._child, self._began = self._child, None, None
        if child is not None:
            child.end()
        self._free()

    def _open(self, backend: Backend, host: str, device: str) -> None:
        """Begin the process. `device` is the only GPU that it sees."""
        if self._child is not None:
            self._child.end()
        seen = {"CUDA_VISIBLE_DEVICES": device} if device else {}
        self._child = GroupChild("send", QUIET | NCCL | seen)
        try:
            reply = self._child.ask(Open(host), BEGIN_SECONDS)
        except ChildLostError as error:
            raise NoTransferError(str(error)) from error
        if not isinstance(reply, Opened):
            raise NoTransferError(reply.reason if isinstance(reply, OrderFailed) else "its store was not opened")
        self._port, self._began = reply.port, (backend, host, device)

    def _free(self) -> None:
        if self._shared is not None:
            self._shared[1].close()
            self._shared = None


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


def device_of(tensors: Mapping[str, Any], backend: Backend) -> str:
    """The GPU that all tensors are on, "" for tensors of the host.

    Raises:
        NoTransferError: they are on several, or on none where the backend wants one.
    """
    devices: Sequence[str] = sorted(
        {uuid_of(each.device) if each.device.type == "cuda" else "" for each in tensors.values() if each.nbytes}
    )
    if len(devices) > 1:
        raise NoTransferError(f"the tensors are on several devices ({', '.join(each or 'host' for each in devices)})")
    if backend == "nccl" and devices != [*filter(None, devices)]:
        raise NoTransferError("NCCL sends from a GPU, and the tensors are in host memory")
    return devices[0] if devices else ""
