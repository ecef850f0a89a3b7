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

from refitd_client.errors import PublishError, TransportRefusedError
from refitd_client.http.client import RefitClient
from refitd_client.http.connection import Connection, connect_to
from refitd_client.http.publisher_client import newest_known, open_client, root_name
from refitd_client.publish.options import PublishOptions
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


def labels_of(client: RefitClient, run: str) -> set[str]:
    """Return the names that the service's versions of a run have from their trainer. Raises ServiceError."""
    found, cursor = set[str](), None
    while True:
        page = client.versions(run, limit=500, cursor=cursor)
        found.update(version.metadata[LABEL] for version in page.items if LABEL in version.metadata)
        if (cursor := page.next_cursor) is None:
            return found


def service_root(connection: Connection, run: str) -> Path:
    """Return the folder that a service watches, where this host has it at the same path.

    Raises:
        PublishError: it is not here.
        ServiceError: the service does not say which it is.
    """
    with open_client(connection, try_for=_ASK_SECONDS) as client:
        page = client.versions(run, limit=1)
    if page.folder is None or not page.root or root_name(Path(page.folder)) != page.root:
        raise PublishError(
            f"the service watches {page.folder or 'no folder'}, as its host calls it, and that is not here: name the "
            "root, the same folder as this host has it"
        )
    return Path(page.folder)


_ASK_SECONDS = 10.0
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
        self._options = options or PublishOptions()
        self._connection = connect_to(service_url, token=self._options.token, token_file=self._options.token_file)
        self._run, self._root, self._timeout = run, root, timeout
        self._publisher: WeightPublisher | None = None
        self._is_new_trainer = self._is_begun = False
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
        self._taken()
        self._is_new_trainer = True

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
        publisher = self._taken()
        step = self._step_of(weight_version)
        folder, self._is_begun, self._folder = self._folder, False, None
        metadata = {} if weight_version is None else {LABEL: weight_version}
        publication = publisher.publish(folder, step=step, metadata=metadata)
        self._is_new_trainer = False
        publication.wait(self._timeout)

    def shutdown_weight_transfer_engine(self) -> None:
        """Give the run back, and drop an update that was not finished."""
        publisher, self._publisher = self._publisher, None
        self._is_begun, self._folder = False, None
        if publisher is not None:
            publisher.close()

    def _require_begun(self) -> None:
        if not self._is_begun:
            raise PublishError("no update has begun: start_weight_update begins one")

    def _taken(self) -> WeightPublisher:
        if self._publisher is None:
            self._root = service_root(self._connection, self._run) if self._root is None else Path(self._root)
            self._publisher = WeightPublisher(
                self._root, self._run, self._connection.service_url, options=self._options
            )
        return self._publisher

    def _step_of(self, label: str | None) -> int:
        if label is not None and is_step(label):
            return int(label) if self._is_new_trainer else step_of_label(label, self._newest())
        known = set[str]()
        if label is not None:
            with open_client(self._connection, try_for=_ASK_SECONDS) as client:
                known = labels_of(client, self._run)
        return step_of_label(label, self._newest(), known)

    def _newest(self) -> int | None:
        """The newest step of the run, as its folder or the service knows it."""
        found = [newest_known(self._connection, self._run)]
        if self._root is not None:
            found.append(newest_in(Path(self._root) / self._run))
        newest = max((order for order in found if order is not None), default=None)
        return None if newest is None or newest.step < 0 else newest.step


def _refused(what: str, info: Mapping[str, Any]) -> TransportRefusedError:
    backend = next((backend for key, backend in _RECEIVED_ELSEWHERE.items() if key in info), None)
    named = f"the backend {backend}" if backend else f"another backend ({', '.join(sorted(map(str, info))) or 'empty'})"
    return TransportRefusedError(
        f"this {what} is of {named}, whose weights a process in the workers' place receives. This client takes "
        'checkpoints alone, {"path": FOLDER}: use vLLM\'s HTTPVLLMWeightSyncClient("http://front:8701") at a '
        "'refitd front', or publish the trainer's source: WeightPublisher(...).publish(source, step=...)"
    )
