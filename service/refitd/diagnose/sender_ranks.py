"""A trainer of several ranks on this host, for the bench of transports: each is a process with its rows of all tensors.

This process asks for one publication after the other, and each rank does it (`ShardedPublisher`).

    ranks    say where their tensors are, or why there are none; rank 0 then says what has come of each publication
    orders   a step and a transport, and whether the weights are changed before; a rank ends with its pipe
"""

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.diagnose.transports import flip, tensors_on
from refitd_client.errors import PublishError
from refitd_client.http.connection import Connection
from refitd_client.publish.publication import StagedPublication
from refitd_client.sharded.holdings import Sharded
from refitd_client.sharded.publisher import ShardedPublisher
from refitd_client.sharded.rank_group import portable
from refitd_client.sharded.routing import hindrances_of_ranks
from refitd_client.transport.group.choice import Choice, TrainerPlace, Transport
from refitd_client.transport.group.host import available
from refitd_client.transport.ipc.device import uuid_of
from refitd_client.transport.ipc.shared import boot_id, host_name

if TYPE_CHECKING:
    import torch

_BEGIN_SECONDS = 300.0
_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank begins with: the model's folder, the device of rank 0, the run and its service; the file where ranks
    meet; and for how many seconds ranks wait for each other.
    """

    folder: Path
    device: str
    root: Path
    run: str
    connection: Connection
    takes_engines: bool
    ranks: int
    store: str
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPublish:
    """An order to publish."""

    step: int
    transport: Transport
    flip: bool


class RankTrainer:
    """The ranks (`refitd.diagnose.transports.BenchTrainer`)."""

    def __init__(self, setup: RankSetup, pipes: list[Pipe]) -> None:
        """Wait until all ranks have their tensors.

        Args:
            setup: theirs.
            pipes: to each of them.

        Raises:
            PublishError: a rank could not begin.
        """
        self._setup, self._pipes, self._flips = setup, pipes, False
        self._lost: PublishError | None = None
        self.ranks = setup.ranks
        begun = self._all(_BEGIN_SECONDS)
        self._places: list[TrainerPlace] = [place for place, _ in begun]
        self.nbytes: int = sum(nbytes for _, nbytes in begun)

    def flip(self) -> None:
        """As `BenchTrainer`: each rank does it when it publishes next."""
        self._flips = not self._flips

    def publish(self, step: int, transport: Transport) -> StagedPublication:
        """As `BenchTrainer`.

        Raises:
            PublishError: what the ranks' publishers raise; or a rank has ended or is silent, also in a call before.
        """
        if self._lost is not None:  # what it still says is of another publication
            raise self._lost
        order, self._flips = RankPublish(step=step, transport=transport, flip=self._flips), False
        for pipe in self._pipes:
            with suppress(OSError):  # it has ended, and says nothing
                pipe.send(order)
        publication = self._all(self._setup.timeout)[0]
        return StagedPublication.of(replace(publication, connection=self._setup.connection))

    def hindrances(self) -> tuple[Choice, dict[str, str]]:
        """As `BenchTrainer`."""
        return hindrances_of_ranks(self._places, self._setup.connection, self._setup.run)

    def _all(self, within: float) -> list[Any]:
        """What all ranks say. Raises the error of the first that has one, when all have answered."""
        said = [self._heard(rank, within) for rank in range(self.ranks)]
        error = next((each for each in said if isinstance(each, Exception)), None)
        if error is not None:
            raise error
        return said

    def _heard(self, rank: int, within: float) -> Any:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(within):
                return pipe.recv()
            self._lost = PublishError(f"rank {rank} says nothing in {within:g} s")
        except (EOFError, OSError):
            self._lost = PublishError(f"rank {rank} has ended")
        return self._lost


@contextmanager
def sender_ranks(setup: RankSetup) -> Generator[RankTrainer]:
    """Ranks that are there inside the context.

    Raises:
        PublishError: one could not begin.
    """
    context = get_context("spawn")  # torch and its threads are in this process
    pairs = [context.Pipe() for _ in range(setup.ranks)]
    with tempfile.TemporaryDirectory(prefix="refitd-ranks-") as folder:
        setup = replace(setup, store=str(Path(folder) / "store"))
        processes = [
            context.Process(target=_rank, args=(rank, setup, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        try:
            for process, (_, theirs) in zip(processes, pairs, strict=True):
                process.start()
                theirs.close()
            yield RankTrainer(setup, [mine for mine, _ in pairs])
        finally:
            for mine, _ in pairs:
                mine.close()  # a rank that waits for an order ends
            for process in processes:
                if process.pid is not None:
                    process.join(_END_SECONDS)
                    process.kill()


def _rank(rank: int, setup: RankSetup, pipe: Pipe) -> None:
    """A rank's process: it does what it is asked to until the pipe is closed."""
    import torch
    from torch import distributed

    try:
        device = device_of(rank, setup.device, torch.cuda.device_count())
        if device != "cpu":
            torch.cuda.set_device(device)
        tensors, parts = rows_of(setup.folder, device, rank, setup.ranks)
        distributed.init_process_group("gloo", init_method=f"file://{setup.store}", rank=rank, world_size=setup.ranks)
        connection = setup.connection
        publisher = ShardedPublisher(
            setup.root,
            setup.run,
            connection.service_url,
            token=connection.token,
            token_file=connection.token_file,
            engines="mine" if setup.takes_engines else None,
            rank_timeout=setup.timeout,
        )
    except Exception as error:
        pipe.send(portable(error))
        return
    devices = frozenset({uuid_of(torch.device(device))} if device != "cpu" else ())
    place = TrainerPlace(host=host_name(), boot=boot_id(), devices=devices, shared=False, backends=available())
    whole = sum(tensor.nbytes for name, tensor in tensors.items() if name not in parts)
    nbytes = sum(tensors[name].nbytes for name in parts) + (0 if rank else whole)
    with publisher:
        pipe.send((place, nbytes))
        try:
            while True:
                _answer(pipe, pipe.recv(), publisher, tensors, parts)
        except (EOFError, OSError):
            pass  # the bench has ended


def _answer(
    pipe: Pipe,
    order: RankPublish,
    publisher: ShardedPublisher,
    tensors: "Mapping[str, torch.Tensor]",
    parts: Mapping[str, Sharded],
) -> None:
    if order.flip:
        flip(tensors)
    try:
        publication = publisher.publish(tensors, step=order.step, sharded=parts, transport=order.transport)
        said: object = replace(publication.committed(), connection=None)
    except Exception as error:
        said = portable(error)
    pipe.send(said)


def device_of(rank: int, first: str, gpus: int) -> str:
    """Where a rank has its tensors: on the GPU that is so many after that of rank 0, and again from the first on.

    Args:
        rank: its number.
        first: the device of rank 0, as torch names it.
        gpus: how many this host has.
    """
    kind, _, number = first.partition(":")
    return first if kind == "cpu" or not gpus else f"{kind}:{(int(number or 0) + rank) % gpus}"


def rows_of(folder: Path, device: str, rank: int, ranks: int) -> "tuple[dict[str, torch.Tensor], dict[str, Sharded]]":
    """A rank's rows of each tensor of a model, and what parts they are. What has no rows each rank has whole.

    Args:
        folder: the model's.
        device: where they are to be.
        rank: its number.
        ranks: how many there are.

    Raises:
        PublishError, OSError: as `tensors_on`.
    """
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, Sharded] = {}
    with tensors_on(folder, "cpu") as tensors:
        for name, tensor in tensors.items():
            part = tensor
            if tensor.dim():
                chunks = tensor.chunk(ranks)
                part = chunks[rank] if rank < len(chunks) else tensor[:0]
                parts[name] = Sharded(dim=0, index=rank, count=ranks, size=tensor.shape[0])
            found[name] = part.to(device, copy=True)
    return found, parts
