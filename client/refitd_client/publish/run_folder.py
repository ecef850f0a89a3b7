"""A run's folder, held by one publisher at a time: what was published in it, and where the next step goes."""

import os
from pathlib import Path

from refitd_client.contract import naming
from refitd_client.contract.naming import Order, version_folder
from refitd_client.errors import NameRefusedError, PublishError, RunBusyError, StepConflictError, StorageError
from refitd_client.files import durable
from refitd_client.files.lock import Holder, Lock, LockHeldError
from refitd_client.publish import generation
from refitd_client.publish.generation import RECORD_NAME, Conflict
from refitd_client.write.slots import Slots

LOCK_NAME = ".publisher.lock"


class RunFolder:
    """`<root>/<run>/`, locked. Not for several threads at once."""

    def __init__(self, root: Path, run: str) -> None:
        """Make the folder if need be, take its lock, and see what was published in it.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher holds it.
            StorageError: it cannot be made, read or locked.
            PublishError: its record cannot be read.
        """
        self.run = _checked(run)
        self.root = root
        self.path = root / run
        self.slots = Slots(root, self.run)
        try:
            durable.make_folders(self.path)
            self.lock = Lock(self.path / LOCK_NAME, 0o660)
        except LockHeldError as error:
            raise _busy(self.run, error.holder) from None
        except OSError as error:
            raise StorageError(f"run {run} cannot be published into {root}: {error}") from error
        self._own: Order | None = None
        try:
            self._found = generation.newest_in(self.path)
        except BaseException:
            self.lock.release()
            raise

    def place(self, step: int) -> Order:
        """The generation and step for a step of the trainer.

        Raises:
            NameRefusedError: no version can have it.
            StepConflictError: it is not after the last, or its folder exists.
            PublishError: the publisher was closed, or belongs to the process that this one was forked from.
        """
        if not self.lock.held:
            raise PublishError(f"this publisher of run {self.run} is closed, or was opened before a fork: open another")
        try:
            placed = generation.decide(naming.check_step(step), found=self._found, own=self._own)
        except naming.NameRefusedError as error:
            raise NameRefusedError(str(error)) from None
        if isinstance(placed, Conflict):
            raise StepConflictError(
                f"step {step} of run {self.run} is not after step {placed.last.step}, which this publisher published: "
                "publish steps in order; after a restart of the trainer, open a new WeightPublisher"
            )
        if os.path.lexists(self.folder_of(placed)):
            raise StepConflictError(f"{self.folder_of(placed)} exists: move it away, or publish a later step")
        return placed

    @property
    def is_begun(self) -> bool:
        """Whether this publisher has published."""
        return self._own is not None

    def heard(self, order: Order) -> None:
        """The service knows of this version in the run: its name is used up, as if it were still in the folder."""
        self._found = order if self._found is None else max(self._found, order)

    def begun(self, order: Order) -> str | None:
        """That a step which was just placed begins a generation of the run, None where it does not."""
        if self._own is not None or self._found is None or order.generation == self._found.generation:
            return None
        return (
            f"step {order.step} is not above {self._found.step}, the last of run {self.run}: "
            f"this begins generation {order.generation}, which takes over"
        )

    def folder_of(self, order: Order) -> Path:
        """Where a version goes."""
        return self.path / version_folder(order)

    def record(self, order: Order, scratch: Path) -> None:
        """Note durably that a version is about to get its name. `scratch` is a folder for the moment in between."""
        durable.replace_file(self.path / RECORD_NAME, generation.to_record(order), by=scratch / RECORD_NAME)

    def promise(self, order: Order) -> None:
        """Note durably that engines may hear of a version whose files do not exist yet. Its step is used up with that:
        a trainer that dies now, and does the step again, begins a generation.
        """
        self._own = order
        durable.replace_file(self.path / RECORD_NAME, generation.to_record(order), by=self.path / f"{RECORD_NAME}.new")

    def published(self, order: Order) -> None:
        """A version got its name."""
        self._own = order

    def taken_back(self, order: Order) -> None:
        """A version had its name for a moment: whoever has seen it takes no other for it, so its step begins anew."""
        self._found, self._own = order, None


def _checked(run: str) -> str:
    try:
        return naming.check_run(run)
    except naming.NameRefusedError as error:
        raise NameRefusedError(str(error)) from None


def _busy(run: str, holder: Holder | None) -> RunBusyError:
    whom = "another publisher" if holder is None else f"process {holder.pid} on {holder.host}"
    return RunBusyError(
        f"run {run} is held by {whom}: one publisher a run, so publish from one rank only, close that publisher first, "
        "or use another run name",
        pid=None if holder is None else holder.pid,
        host=None if holder is None else holder.host,
    )
