"""A rank's receiver process: what a trainer sends over a process group arrives there, and is offered on this host.

The process is begun for the first transfer and kept. It is ended where it does not answer in time, or where what it was
to receive is not wanted any more and it does not stop: neither the rank's threads nor the engine's wait for it. What
it offers lies in a folder of its own, `<root>/.refitd/receivers/<socket's name>/`, with the lock that shows its life.
"""

from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.transport.group.child import ChildLostError, GroupChild, OrderFailed, Receive, Received
from refitd_client.transport.group.sending import NCCL, QUIET, SEND_SECONDS
from refitd_client.transport.ipc import exporter
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.shards.needs import FOLDER
from refitd_plugin.source import SourceRefusedError

_RECEIVERS_MODE = 0o770


class RankReceiver:
    """The process of one rank. `device` is the rank's GPU, None where its model is in host memory."""

    def __init__(self, device: Any) -> None:
        self.name = ""
        self._device = device
        self._child: GroupChild | None = None

    def named(self, name: str) -> None:
        """Have a name in transfers: that of the rank's socket, which no other rank has."""
        self.name = name

    def receive(self, root: Path, offer: str, stop: Event, needs: str = "") -> str:
        """Receive what an offer says is sent to this rank.

        Args:
            root: refitd's root.
            offer: the path beneath it of the trainer's offer.
            stop: ends the wait.
            needs: the digest of what is sent to this rank, "" for everything.

        Returns:
            The path beneath the root of the offer of what has arrived, with the same fingerprints.

        Raises:
            SourceRefusedError: it has not arrived, or is not what was announced.
            OSError: there is no folder for it.
        """
        folder = folder_of_receiver(root, self.name)
        order = Receive(
            root=str(root),
            offer=offer,
            name=self.name,
            folder=str(folder),
            within=SEND_SECONDS,
            on_device=self._device is not None,
            needs=needs,
        )
        if self._child is None:
            seen = {} if self._device is None else {"CUDA_VISIBLE_DEVICES": uuid_of(self._device)}
            self._child = GroupChild("receive", QUIET | NCCL | seen)
        try:
            reply = self._child.ask(order, SEND_SECONDS, stop)
        except ChildLostError as error:
            _empty(folder)
            raise SourceRefusedError(f"it was not received: {error}") from error
        match reply:
            case Received(offer=name):
                return str(folder.relative_to(root) / name)
            case OrderFailed(reason):
                raise SourceRefusedError(f"it was not received: {reason}")
            case _:
                raise SourceRefusedError("it was not received: the receiver has said something else")

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()


def folder_of_receiver(root: Path, name: str) -> Path:
    """The receiver's own folder, made where it is not there."""
    above = root / SERVICE_FOLDER / FOLDER
    for each in (above, above / name):
        with suppress(FileExistsError):
            each.mkdir()
            each.chmod(_RECEIVERS_MODE)  # the group shares it, whatever the umask
    return above / name


def _empty(folder: Path) -> None:
    """Remove the offers that a receiver that was ended has left."""
    for path in [*folder.glob(f"{exporter.OFFERS}*"), *folder.glob(f"{exporter.MAKING}*")]:
        with suppress(OSError):
            path.unlink()
