"""vLLM's protocol of a trainer, over the SDK alone, and what it shares with the front, which is a server for it.

>>> client = VLLMWeightSyncClient("http://127.0.0.1:8700", "exp/trial")
>>> client.start_weight_update()
>>> client.update_weights({"path": "/checkpoints/step_7"})
>>> client.finish_weight_update("7")  # the engines of the run serve it
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from refitd_client.errors import PublishError, ServiceError, TransportRefusedError
from refitd_client.http.client import RefitClient
from refitd_client.http.connection import Connection, connect_to
from refitd_client.http.publisher_client import newest_known, open_client, root_name
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication
from refitd_client.publish.run_folder import newest_in
from refitd_client.publisher import WeightPublisher

LABEL = "weight_version"
"""The key of a version's metadata under which the trainer's own name of it stands."""


class LabelRefusedError(PublishError, ValueError):
    """The name that a trainer gives a version cannot be its name. The message is a sentence."""


def step_of_label(label: str | None, newest: int | None, known: Collection[str] = ()) -> int:
    """Return the step of the next version of a run. Pure.

    Args:
        label: the trainer's name of the version. A whole number is its step.
        newest: the newest step of the run, None where there is none.
        known: the names of the run's versions.

    Raises:
        LabelRefusedError: a version has this name already, or the step is not above the newest.
    """
    following = 1 if newest is None else newest + 1
    if label is None:
        return following
    if not label or len(label) > 200 or not label.isprintable():
        raise LabelRefusedError("weight_version is empty, longer than 200 characters or not printable")
    if is_step(label):
        if int(label) < following and newest is not None:
            raise LabelRefusedError(
                f"weight_version {label} is not above {newest}, the newest of the run: versions of one training grow"
            )
        return int(label)
    if label in known:
        raise LabelRefusedError(f"the run has a version with weight_version {label} already")
    return following


def is_step(label: str) -> bool:
    """Whether a trainer's name of a version is its step."""
    return label.isascii() and label.isdecimal() and len(label) <= 13


def service_root(connection: Connection, run: str) -> Path:
    """Return the folder that a service watches, where this host has it at the same path.

    Raises:
        PublishError: it is not here.
        ServiceError: the service does not say which it is.
    """
    with open_client(connection, try_for=ASK_SECONDS) as client:
        page = client.versions(run, limit=1)
    if page.folder is None or not page.root or root_name(Path(page.folder)) != page.root:
        raise PublishError(
            f"the service watches {page.folder or 'no folder'}, as its host calls it, and that is not here: name the "
            "root, the same folder as this host has it"
        )
    return Path(page.folder)


class NamedVersions:
    """Publishes the versions of a run by the names that its trainer gives them. The run is held from `open` to `close`.

    Args:
        root: the folder that the service watches; None: the one that it names, if that is here.
    """

    def __init__(
        self, connection: Connection, run: str, root: str | os.PathLike[str] | None, options: PublishOptions
    ) -> None:
        self.run, self._root = run, None if root is None else Path(root)
        self.connection, self._options = connection, options
        self._publisher: WeightPublisher | None = None
        self._newest: int | None = None
        self.is_new_trainer = False

    @property
    def root(self) -> Path:
        if self._root is None:
            self._root = service_root(self.connection, self.run)
        return self._root

    def open(self) -> WeightPublisher:
        """Take the run.

        Raises:
            RefitError, OSError: it cannot be had, or the root is not here.
        """
        if self._publisher is None:
            self._publisher = WeightPublisher(self.root, self.run, self.connection.service_url, options=self._options)
        return self._publisher

    def close(self) -> None:
        publisher, self._publisher, self._newest = self._publisher, None, None
        if publisher is not None:
            publisher.close()

    def publish(self, weights: Any, label: str | None, step: int | None = None) -> Publication:
        """Publish a version. A trainer that is new may begin its steps again, in another generation of the run.

        Args:
            weights: as those of `WeightPublisher.publish`.
            label: the trainer's name of the version, None where it gives none.
            step: where the trainer says it by itself.

        Raises:
            LabelRefusedError: a version has this name, or the step is not above the newest.
            RefitError: as `WeightPublisher.publish`.
        """
        step = self._step_of(label) if step is None else step
        if self._newest is not None and step <= self._newest:
            self.close()  # the trainer has begun again: another publisher begins another generation
        try:
            publication = self.open().publish(weights, step=step, metadata={} if label is None else {LABEL: label})
        except ServiceError as error:
            if not isinstance(error.publication, Publication):
                raise
            # The version stands, and only its notice was refused: the wait for it tells the service again, and
            # raises the cause. To publish the step again would be a conflict, and hide the cause.
            publication = error.publication
        self._newest, self.is_new_trainer = step, False
        return publication

    def _step_of(self, label: str | None) -> int:
        if label is not None and is_step(label) and self.is_new_trainer:
            self.close()  # as above, where the step is not above the newest
            return int(label)
        newest, known = self._newest, set[str]()
        if newest is None:
            run = self.root / self.run
            found = [newest_known(self.connection, self.run), newest_in(run) if run.is_dir() else None]
            order = max((each for each in found if each is not None), default=None)
            newest = None if order is None or order.step < 0 else order.step
        if label is not None and not is_step(label):
            with open_client(self.connection, try_for=ASK_SECONDS) as client:
                known = _labels_of(client, self.run)
        return step_of_label(label, newest, known)


def _labels_of(client: RefitClient, run: str) -> set[str]:
    """Return the names that the service's versions of a run have from their trainer. Raises ServiceError."""
    found, cursor = set[str](), None
    while True:
        page = client.versions(run, limit=500, cursor=cursor)
        found.update(version.metadata[LABEL] for version in page.items if LABEL in version.metadata)
        if (cursor := page.next_cursor) is None:
            return found


ASK_SECONDS = 10.0
_RECEIVED_ELSEWHERE = {  # by the key that tells it, the most telling first
    "nccl_unique_id_b64": "nccl",
    "master_address": "nccl",
    "ipc_handles": "ipc",
    "ipc_handles_pickled": "ipc",
    "packed": "ipc",
    "num_updates_list": "sparse_nccl",
    "names": "nccl",
}


class VLLMWeightSyncClient:
    """vLLM's `VLLMWeightSyncClient`, which its trainer engines call, for the engines that refitd keeps.

    A checkpoint in a folder (`disk`) is one version. All else that vLLM's backends send is received by processes in the
    workers' places, which `refitd front` has.
    """

    def __init__(
        self,
        service_url: str,
        run: str,
        root: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 300.0,
        options: PublishOptions | None = None,
    ) -> None:
        """Remember the arguments. The run is taken by the first call that needs it, and held until `shutdown…`.

        Args:
            service_url: the service that has the engines.
            run: the run's name, which engines follow.
            root: the folder that the service watches; by default the one that it names, if that is here.
            timeout: seconds that an update waits for the engines.
            options: those of a `WeightPublisher`.

        Raises:
            ValueError: the URL or the token cannot be one.
        """
        options = options or PublishOptions()
        connection = connect_to(service_url, token=options.token, token_file=options.token_file)
        self._versions, self._timeout = NamedVersions(connection, run, root, options), timeout
        self._is_begun = False
        self._folder: Path | None = None

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Take the run. From here on a whole number that is not above the newest step begins a generation of the run.

        Raises:
            TransportRefusedError: it is of another backend than `disk`, which has nothing to say here.
            PublishError: the root is not here, or the run is another publisher's.
            ServiceError: the service does not say what it watches.
        """
        if init_info:
            raise _refused("init_info", init_info)
        self.shutdown_weight_transfer_engine()
        self._versions.open()
        self._versions.is_new_trainer = True

    def start_weight_update(self) -> None:
        """Begin an update. One that was begun before, and not finished, is dropped."""
        self._is_begun, self._folder = True, None

    def update_weights(self, update_info: Mapping[str, Any] | list[dict[str, Any]]) -> None:
        """Take note of the checkpoint of this update: `{"path": FOLDER}`. It is read by `finish_weight_update`.

        Raises:
            TransportRefusedError: the weights come in another way.
            PublishError: no update was begun, or it has another checkpoint already.
        """
        self._require_begun()
        for info in update_info if isinstance(update_info, list) else [update_info]:
            if info.keys() != {"path"}:
                raise _refused("update_info", info)
            folder = Path(info["path"]).absolute()
            if self._folder not in (None, folder):
                raise PublishError(f"an update is one checkpoint, and this one has {self._folder}: {folder} is another")
            self._folder = folder

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Publish the checkpoint, and wait until each engine of the run that can be reached serves it.

        Args:
            weight_version: the trainer's name of the version. A whole number is its step. Any other text stands in its
                metadata under `weight_version`, and steps are counted on.

        Raises:
            LabelRefusedError: a version has this name, or the step is not above the newest. The update can be finished
                with another name.
            PublishError: no update was begun, it has no weights, or they cannot be a version.
            RefitError: the version is not served; as `Publication.wait` raises it.
        """
        self._require_begun()
        if self._folder is None:
            raise PublishError("no weights have come since the update began: update_weights names a checkpoint")
        try:
            publication = self._versions.publish(self._folder, weight_version)
        except LabelRefusedError:
            raise
        except BaseException:
            self._is_begun, self._folder = False, None
            raise
        self._is_begun, self._folder = False, None
        publication.wait(self._timeout)

    def shutdown_weight_transfer_engine(self) -> None:
        """Give the run back, and drop an update that was not finished."""
        self._is_begun, self._folder = False, None
        self._versions.close()

    def _require_begun(self) -> None:
        if not self._is_begun:
            raise PublishError("no update has begun: start_weight_update begins one")


def _refused(what: str, info: Mapping[str, Any]) -> TransportRefusedError:
    backend = next((backend for key, backend in _RECEIVED_ELSEWHERE.items() if key in info), None)
    named = f"the backend {backend}" if backend else f"another backend ({', '.join(sorted(map(str, info))) or 'empty'})"
    return TransportRefusedError(
        f"this {what} is of {named}, whose weights a process in the workers' place receives. This client takes "
        'checkpoints alone, {"path": FOLDER}: use vLLM\'s HTTPVLLMWeightSyncClient("http://front:8701") at a '
        "'refitd front', or publish the trainer's source: WeightPublisher(...).publish(source, step=...)"
    )
