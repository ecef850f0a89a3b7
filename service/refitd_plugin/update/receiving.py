"""A rank's receiver process: what a trainer sends over a process group arrives there, and is offered on this host.

The process is begun for the first transfer and kept. It is ended where it does not answer in time, or where what it was
to receive is not wanted any more and it does not stop: neither the rank's threads nor the engine's wait for it. What
it offers lies in a folder of its own, `<root>/.refitd/receivers/<socket's name>/`, with the lock that shows its life.

A rank needs some bytes of each checkpoint tensor, by its load plan: with tensor parallelism mostly a slice. Only a plan
that is proven says it: there the copies are all that a load does, but for the tensors that go through the loader, which
are needed whole. A tensor that no copy touches, such as an expert that another rank holds, is not needed.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from pathlib import Path
from threading import Event
from typing import Any

from refitd_client.checkpoint.header import BITS
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.durable import write_file
from refitd_client.transport import exporter
from refitd_client.transport.child import ChildLostError, GroupChild, OrderFailed, Receive, Received
from refitd_client.transport.device import uuid_of
from refitd_client.transport.needs import FOLDER, PREFIX, RankNeeds, TensorNeeds, encode, path_of, whole
from refitd_client.transport.schedule import Strip, joined, strip
from refitd_client.transport.sending import NCCL, QUIET, SEND_SECONDS
from refitd_client.validation.validate import Structure
from refitd_plugin.memory.source import SourceRefusedError
from refitd_plugin.memory.spans import merge_dimensions
from refitd_plugin.update.plan import ReplayPlan
from refitd_plugin.update.recorder import PlanCopy

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
        """Receive what the trainer's offer, a path beneath the root, says is sent to this rank. Returns the path of the
        offer of what has arrived, with the same fingerprints. `needs`: the digest of what is sent, "" for everything.

        Raises:
            SourceRefusedError: it has not arrived, or is not what was announced. OSError: there is no folder for it.
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


_MOST_STRIPS = 256  # of one tensor: one that is needed in more pieces is sent whole


def needs_of(plan: ReplayPlan, sizes: Mapping[str, int]) -> RankNeeds | None:
    """What a rank with this plan needs; None where only the loader knows. `sizes`: bytes of the checkpoint's
    tensors.
    """
    if not plan.replays or not plan.proven:
        return None
    copies: dict[str, list[PlanCopy]] = {}
    for copy in plan.copies:
        copies.setdefault(copy.name, []).append(copy)
    residual = frozenset(plan.residual)
    found: dict[str, TensorNeeds] = {}
    for name, nbytes in sizes.items():
        if name in residual:
            found[name] = whole(nbytes)
        elif name in plan.unused:
            found[name] = TensorNeeds(nbytes)
        else:
            found[name] = _of_copies(copies.get(name, ()), nbytes)
    return RankNeeds(found)


def _of_copies(copies: Sequence[PlanCopy], nbytes: int) -> TensorNeeds:
    strips: set[Strip] = set()
    for copy in copies:
        more = strips_of(copy.offset, copy.shape, copy.strides, copy.target.element_size())
        if more is None or len(strips := strips | set(more)) > _MOST_STRIPS:
            return whole(nbytes)
    together = _together(sorted(strips))
    if not together or sum(each.nbytes for each in together) >= nbytes:
        return whole(nbytes)
    return TensorNeeds(nbytes, tuple(together))


def _together(strips: Sequence[Strip]) -> list[Strip]:
    lines = joined((each.begin, each.width) for each in strips if each.rows == 1)
    return sorted([*lines, *(each for each in strips if each.rows > 1)])


def strips_of(offset: int, shape: Sequence[int], strides: Sequence[int], size: int) -> list[Strip] | None:
    """The bytes that a copy reads; None where they are in too many pieces. `offset`, of its first element, and
    `strides` count elements of so many bytes.
    """
    if not all(shape):
        return []
    dimensions = [(count, stride) for count, stride, _ in merge_dimensions(shape, strides, strides)]
    width = size
    if dimensions and dimensions[-1][1] == 1:
        width = dimensions.pop()[0] * size
    rows, pitch = (1, width) if not dimensions else (dimensions[-1][0], dimensions[-1][1] * size)
    if pitch < width:
        return None
    above = dimensions[:-1]
    if prod(many for many, _ in above) > _MOST_STRIPS:
        return None
    places = product(*(range(0, count * stride, stride) for count, stride in above))
    return [strip((offset + sum(place)) * size, width, rows, pitch) for place in places]


def sizes_of(structure: Structure) -> dict[str, int]:
    return {name: prod(each.shape) * BITS[each.dtype] // 8 for name, each in structure.inventory.tensors.items()}


class AnnouncedNeeds:
    """What one rank needs now, written where trainers read it. Made anew when the plan is another one."""

    def __init__(self) -> None:
        self._known: tuple[ReplayPlan, str] | None = None

    def digest(self, plan: ReplayPlan | None, sizes: Mapping[str, int] | None, root: Path, receiver: str) -> str:
        """The digest of what the rank needs, "" where it needs everything or does not know. `receiver`: its name in
        transfers.
        """
        if plan is None or sizes is None or not receiver or not plan.proven:
            return ""
        if self._known is None or self._known[0] is not plan:
            self._known = plan, _written(needs_of(plan, sizes), root, receiver)
        return self._known[1]


def _written(needs: RankNeeds | None, root: Path, receiver: str) -> str:
    if needs is None or all(each.strips and not each.is_partial for each in needs.tensors.values() if each.nbytes):
        return ""
    data, digest = encode(needs)
    try:
        folder = folder_of_receiver(root, receiver)
        path = path_of(root, receiver, digest)
        made = folder / f".making-{path.name}"
        made.unlink(missing_ok=True)  # of a process that was killed
        write_file(made, data)
        made.rename(path)
        for other in folder.glob(f"{PREFIX}*"):
            if other != path:
                with suppress(FileNotFoundError):
                    other.unlink()
    except OSError:
        return ""  # it gets everything
    return digest
