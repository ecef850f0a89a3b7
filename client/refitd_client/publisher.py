"""The trainer's side: weights become a version on disk, whole or not at all, and the service is told.

    <root>/<run>/.incoming-…/   model-0000i-of-0000N.safetensors, each synced
                                model.safetensors.index.json, after the shards
                                config.json, tokenizer files
                                refit.json, the manifest: every file's size and digest; sync of the folder
    <root>/<run>/.publisher.json   the generation and step, so that neither is ever used again
    <root>/<run>/v000123/       by rename; sync of the parent; then the notice

Whatever stops a trainer, and wherever: a version is there, complete and synced, or it is not there at all.
"""

import errno
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from refitd_client.base_model import BaseModel
from refitd_client.connection import Connection, connect_to
from refitd_client.content import Reading
from refitd_client.contract.naming import Order, version_folder, version_id
from refitd_client.contract.wire import Notice
from refitd_client.errors import Fault, ServiceError, StorageError
from refitd_client.progress import Laps, Progress
from refitd_client.publication import Publication, no_token, open_client
from refitd_client.run_folder import RunFolder
from refitd_client.staging import free_bytes, no_space
from refitd_client.writing import Written, write_version

if TYPE_CHECKING:
    import torch

# Seconds in which new tries to send the notice begin; the last may take as long again.
NOTICE_DEADLINE = 2.5

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_log = logging.getLogger("refitd_client")


class WeightPublisher:
    """Publishes the versions of one run. One at a time: the run stays locked until `close`, or the process ends.

    >>> with WeightPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
    ...     publisher.publish(model, step=123).wait()
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        base_model: str | os.PathLike[str] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        max_shard_bytes: int = 5 * 10**9,
        check_finite: bool = True,
    ) -> None:
        """Take a run.

        Args:
            root: the folder that the service watches; made if it is not there.
            run: the run's name, such as `experiment/trial`.
            service_url: whom to send notices; without it the service finds versions by watching the root.
            base_model: a model's folder, whose configuration and tokenizer files go into each version, and whose
                tensors' names decide which names of tied weights are written.
            token: the bearer token; else `token_file`, `REFITD_TOKEN`, `REFITD_TOKEN_FILE`.
            token_file: holds the token, and is read again for each request.
            max_shard_bytes: tensors are cut into files of at most so many bytes.
            check_finite: refuse tensors with NaN or infinity. Checkpoints in folders are left to the service to check.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher has the run.
            PublishError: `base_model` is no model's folder, or the run's record is damaged.
            StorageError: the run's folder cannot be made, read or locked.
            ValueError: the URL, the token or `max_shard_bytes` cannot be one.
        """
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}; a shard takes at least one byte")
        self._reading = Reading(
            base_model=BaseModel(Path(base_model)) if base_model is not None else None,
            max_shard_bytes=max_shard_bytes,
            check_finite=check_finite,
        )
        self._connection: Connection | None = None
        if service_url is not None:
            self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._turn = threading.Lock()
        self._folder = RunFolder(Path(root).absolute(), run)
        self._finalizer = weakref.finalize(self, self._folder.lock.release)

    def close(self) -> None:
        """Let the run go. Publications stay usable."""
        with self._turn:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begins(self, step: int) -> str | None:
        """Say, in a sentence, that publishing this step now would begin a generation of the run; None if it would not.

        Raises:
            StepConflictError, NameRefusedError: the step cannot be published.
            PublishError: this publisher is closed.
        """
        return self._folder.begun(self._folder.place(operator.index(step)))

    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Publication:
        """Write a version, commit it and tell the service. Returns when it is on stable storage.

        A folder's files are cloned or copied, never linked: nothing that the trainer does to its own files or tensors
        afterwards changes a version. A first step that was published before begins a new generation of the run, which
        is logged as a warning.

        Args:
            weights: a state dict of torch tensors or numpy arrays, an `nn.Module` (its parameters and persistent
                buffers), or the path of a checkpoint's folder with `*.safetensors`.
            step: the trainer's step, above the last that this publisher published.
            metadata: texts for the manifest and the service.
            progress: is called with how far writing is, in this thread.

        Raises:
            InvalidWeightsError: the weights cannot be a version; the message names the tensor or file.
            StepConflictError, NameRefusedError: the step cannot be published.
            NoSpaceError, StorageError: the file system would not.
            ServiceProblemError: the service refuses the notice, as for a wrong token. The version stands all the
                same, and is the error's `publication`. A service that is down raises nothing: see `notice_error`.
        """
        step = operator.index(step)
        told = dict(metadata or {})
        with self._turn:
            order = self._folder.place(step)
            begun = self._folder.begun(order)
            written = self._write(weights, order, told, progress)
        if begun is not None:
            _log.warning("%s", begun)
        return self._announce(order, written, told, begun)

    def _write(
        self, weights: Any, order: Order, metadata: dict[str, str], progress: Callable[[Progress], None] | None
    ) -> Written:
        needed = 0
        try:
            content = self._reading.content(weights)
            needed = content.size
            return write_version(self._folder, order, content, metadata=metadata, progress=progress)
        except OSError as error:
            raise self._refusal(error, order, needed) from error

    def _refusal(self, error: OSError, order: Order, needed: int) -> StorageError:
        if error.errno in _FULL:
            return no_space(self._folder.path, needed, free_bytes(self._folder.path))
        return StorageError(f"{self._folder.folder_of(order)} could not be written: {error}")

    def _announce(self, order: Order, written: Written, metadata: dict[str, str], begun: str | None) -> Publication:
        run = self._folder.run
        notice = Notice(run=run, step=order.step, path=f"{run}/{version_folder(order)}", metadata=metadata)
        laps = Laps()
        with laps.lap("notice"):
            error = _tell(self._connection, notice)
        publication = Publication(
            run=run,
            generation=order.generation,
            step=order.step,
            path=self._folder.folder_of(order),
            version_id=version_id(run, order),
            bytes=written.bytes,
            digest=written.manifest.digest,
            timings=written.timings | laps.times,
            notice=notice,
            connection=self._connection,
            notice_error=error,
            begun=begun,
        )
        if error is not None:
            _report(error, publication)
        return publication


def _tell(connection: Connection | None, notice: Notice) -> ServiceError | None:
    if connection is None:
        return None
    try:
        with open_client(connection, try_for=NOTICE_DEADLINE) as client:
            client.announce(notice)
    except ServiceError as error:
        return error
    except (OSError, ValueError) as error:
        return no_token(error)
    return None


def _report(error: ServiceError, publication: Publication) -> None:
    error.publication = publication
    if error.fault is Fault.TRAINER:
        raise error
    _log.warning("%s is published, but the service was not told (%s); it will find it", publication.version_id, error)
