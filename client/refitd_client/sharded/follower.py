"""What every rank does, rank 0 among them: bring its claims, and carry out orders."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refitd_client.errors import PublishError
from refitd_client.files import durable
from refitd_client.sharded import blame, writing
from refitd_client.sharded.claims import Claim
from refitd_client.sharded.description import Sharded
from refitd_client.sharded.digesting import digested, fingerprinted
from refitd_client.sharded.holdings import Holding, Options, holdings_of
from refitd_client.sharded.messages import Digest, Done, Failed, Opening, Task, Write
from refitd_client.sharded.reading import Reader
from refitd_client.sharded.samples import samples_of


class Follower:
    """A rank's state from one publication to the next: its claims, and the task that rank 0 made of them."""

    def __init__(self, folder: Path, options: Options, ranks: int, *, check_finite: bool) -> None:
        """`folder` is the run's, as this rank sees it; `ranks` there are."""
        self._folder = folder
        self._options = options
        self._check_finite = check_finite
        self._reader = Reader(ranks)
        self._holdings: dict[str, Holding] = {}
        self._staging = folder
        self._claims: list[Claim] = []
        self._task: Task | None = None
        self._task_claims: list[Claim] | None = None

    def open(self, weights: Any, step: int, sharded: Mapping[str, Sharded]) -> Opening | Failed:
        """See what this rank has."""
        try:
            self._holdings = holdings_of(weights, self._options, sharded)
            self._claims = [holding.claim for holding in self._holdings.values()]
            is_known = self._task is not None and self._claims == self._task_claims
            return Opening(
                step=step,
                layout=self._task.number if self._task is not None else 0,
                claims=None if is_known else self._claims,
                samples=samples_of(self._holdings.values()),
            )
        except Exception as error:
            return Failed(error=blame.portable(error))

    def answer(self, order: Write | Digest) -> Done | Failed:
        """Carry an order out. What goes wrong is an answer, too, because rank 0 waits for one."""
        try:
            match order:
                case Write():
                    self._write(order)
                    return Done()
                case Digest():
                    return self._digest(order)
        except Exception as error:
            return Failed(error=blame.portable(error))

    def _digest(self, order: Digest) -> Done:
        paths = [self._staging / name for name in order.names]
        found = self._reader.each(paths, fingerprinted if order.fingerprints else digested)
        return Done(
            files={path.name: each.file for path, each in zip(paths, found, strict=True)},
            fingerprints={name: number for each in found for name, number in each.fingerprints.items()},
        )

    def close(self) -> None:
        """Give threads and buffers back."""
        self._reader.close()

    def forget(self) -> None:
        """Nothing was published: rank 0 may have agreed on another layout, of which nobody was told."""
        self._task = self._task_claims = None

    def release(self) -> None:
        """Let go of the tensors."""
        self._holdings = {}

    def _write(self, order: Write) -> None:
        if order.task is not None:
            self._task, self._task_claims = order.task, self._claims
        task = self._task
        if task is None:
            raise PublishError("this rank was asked to write before it was told what")
        self._staging = self._folder / order.staging
        with writing.opening(self._staging, task.files) as files:
            writer = writing.RankWriter(files, task.locations, self._reader, check_finite=self._check_finite)
            writer.write(self._holdings, task.parts)
            for number in sorted({task.locations[part.name].file for part in task.parts}):
                durable.sync(files()[number])  # each rank its own: another host's writes are in that host's memory
