"""The trainer's side: weights become a version on disk, whole or not at all, and the service is told.

    <root>/<run>/.incoming-…/   model-0000i-of-0000N.safetensors, each synced
                                model.safetensors.index.json, after the shards
                                config.json, tokenizer files
                                refit.json, the manifest: every file's size and digest; sync of the folder
    <root>/<run>/.publisher.json   the generation and step, so that neither is ever used again
    <root>/<run>/v000123/       by rename; sync of the parent; then the notice

Whatever stops a trainer, and wherever: a version is there, complete and synced, or it is not there at all.

Where the service hands the files of old versions back, `.incoming-…` is one of these slots and its shards are written
in place: see `refitd_client.contract.slot`. With `block="staged"` the trainer goes on as soon as the tensors' bytes are
in the files; the rest is done by one thread, in order.
"""

import errno
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from refitd_client.background import Background
from refitd_client.base_model import BaseModel
from refitd_client.casts import casts
from refitd_client.connection import Connection, connect_to
from refitd_client.content import Content, Reading
from refitd_client.contract.naming import Order, version_folder, version_id
from refitd_client.contract.wire import Notice
from refitd_client.errors import Fault, RefitError, ServiceError, StorageError
from refitd_client.mapped import Mappings
from refitd_client.progress import Laps, Progress
from refitd_client.publication import Publication, StagedPublication, no_token, open_client
from refitd_client.run_folder import RunFolder
from refitd_client.staging import free_bytes, no_space
from refitd_client.trainer_names import Rename
from refitd_client.writing import Written, stage_version, write_version

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
        max_shard_bytes: int | None = None,
        check_finite: bool = True,
        dtype: Any = None,
        rename: Rename | None = None,
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
            max_shard_bytes: tensors are cut into files of at most so many bytes; by default into about 16 files of
                64 MB to 5 GB, which several threads write and digest.
            check_finite: refuse tensors with NaN or infinity. Checkpoints in folders are left to the service to check.
            dtype: publish floating-point tensors in this dtype (`torch.bfloat16`), or by the first matching pattern of
                a mapping (`{"*.router.*": torch.float32, "*": torch.bfloat16}`) from published names to dtypes.
                Checkpoints in folders keep theirs.
            rename: published names for the trainer's, as a mapping or a function; None leaves a tensor out. Marks of
                wrappers (`_fsdp_wrapped_module.`, `_orig_mod.`, DDP's `module.`) are taken off before.

        Raises:
            NameRefusedError: the run's name is no safe relative one.
            RunBusyError: another publisher has the run.
            PublishError: `base_model` is no model's folder, or the run's record is damaged.
            StorageError: the run's folder cannot be made, read or locked.
            ValueError: the URL, the token or `max_shard_bytes` cannot be one.
        """
        if max_shard_bytes is not None and max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}; a shard takes at least one byte")
        self._reading = Reading(
            base_model=BaseModel(Path(base_model)) if base_model is not None else None,
            max_shard_bytes=max_shard_bytes,
            check_finite=check_finite,
            casts=casts(dtype),
            rename=rename,
        )
        self._connection: Connection | None = None
        if service_url is not None:
            self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._turn = threading.Lock()
        self._folder = RunFolder(Path(root).absolute(), run)
        self._background = Background()
        self._mappings = Mappings()
        self._finalizer = weakref.finalize(self, self._folder.lock.release)

    def close(self) -> None:
        """Finish what is under way, and let the run go. Publications stay usable.

        Raises:
            PublishError, ServiceProblemError: a publication failed in the background, and nobody has heard of it.
        """
        with self._turn:
            try:
                self._background.close()
            finally:
                self._mappings.close()
                self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except RefitError as error:
            if kind is None:
                raise
            _log.warning("a publication has failed as well: %s", error)  # what is being raised came first

    @overload
    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
        block: Literal["committed"] = "committed",
    ) -> Publication: ...

    @overload
    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
        block: Literal["staged"],
    ) -> StagedPublication: ...

    def publish(
        self,
        weights: "Mapping[str, Any] | torch.nn.Module | str | os.PathLike[str]",
        *,
        step: int,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
        block: Literal["committed", "staged"] = "committed",
    ) -> Publication | StagedPublication:
        """Write a version, commit it and tell the service. Returns when it is on stable storage.

        With `block="staged"` it returns when the tensors may be changed; checks, digests, syncs, commit and notice go
        on in a thread of the publisher's. What fails there is raised by the publication's `wait` or `committed`, or by
        the next call, which waits for the end of the one before it; then nothing of the new step has been written.

        A folder's files are cloned or copied, never linked: nothing that the trainer does to its own files or tensors
        afterwards changes a version. A first step that was published before begins a new generation of the run.

        Args:
            weights: a state dict of torch tensors or numpy arrays, an `nn.Module` (its parameters and persistent
                buffers), or the path of a checkpoint's folder with `*.safetensors`.
            step: the trainer's step, above the last that this publisher published.
            metadata: texts for the manifest and the service.
            progress: is called with how far writing is, in this thread.
            block: `committed` or `staged`.

        Raises:
            InvalidWeightsError: the weights cannot be a version; the message names the tensor or file.
            StepConflictError, NameRefusedError: the step cannot be published.
            NoSpaceError, StorageError: the file system would not.
            ServiceProblemError: the service refuses the notice, as for a wrong token. The version stands all the
                same, and is the error's `publication`. A service that is down raises nothing: see `notice_error`.
        """
        step = operator.index(step)
        if block not in {"committed", "staged"}:
            raise ValueError(f"block is {block!r}: it is 'committed' or 'staged'")
        told = dict(metadata or {})
        with self._turn:
            self._background.settle()
            order = self._folder.place(step)
            self._mappings.prune()
            if block == "staged":
                return self._stage(weights, order, told, progress)
            written = self._write(weights, order, told, progress)
        return self._announce(order, written, told)

    def _write(
        self, weights: Any, order: Order, metadata: dict[str, str], progress: Callable[[Progress], None] | None
    ) -> Written:
        content = None
        try:
            content = self._reading.content(weights)
            return write_version(
                self._folder, order, content, metadata=metadata, progress=progress, mappings=self._mappings
            )
        except OSError as error:
            raise self._refusal(error, order, content) from error

    def _stage(
        self, weights: Any, order: Order, metadata: dict[str, str], progress: Callable[[Progress], None] | None
    ) -> StagedPublication:
        content = None
        try:
            content = self._reading.content(weights)
            finish = stage_version(
                self._folder, order, content, metadata=metadata, progress=progress, mappings=self._mappings
            )
        except OSError as error:
            raise self._refusal(error, order, content) from error
        staged = content

        def commit() -> Publication:
            try:
                written = finish()
            except OSError as error:
                raise self._refusal(error, order, staged) from error
            return self._announce(order, written, metadata)

        return StagedPublication(
            run=self._folder.run,
            generation=order.generation,
            step=order.step,
            path=self._folder.folder_of(order),
            version_id=version_id(self._folder.run, order),
            outcome=self._background.begin(commit),
        )

    def _refusal(self, error: OSError, order: Order, content: Content | None) -> StorageError:
        if error.errno in _FULL:
            needed = 0 if content is None else content.size
            return no_space(self._folder.path, needed, free_bytes(self._folder.path))
        return StorageError(f"{self._folder.folder_of(order)} could not be written: {error}")

    def _announce(self, order: Order, written: Written, metadata: dict[str, str]) -> Publication:
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
