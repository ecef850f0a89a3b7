"""What a trainer sends becomes a version: held in the root before the trainer deletes it, and served before the answer.

A trainer may tell every engine of one update at about the same time. It tries again when an answer is lost, and deletes
its folder when all have answered. So the first call publishes a copy of the folder (a clone, where the file system
shares blocks), and every call waits until engines serve it.

The network asks the front to read a folder and to publish it. A link in that folder could lead to any file that the
front's user can read, and other users read a version's files. So every file is opened beneath a folder that the
operator named, from one descriptor to the next, without following links. The publisher gets a folder of our own, in
which each name leads to the open descriptor: files that change meanwhile, and other paths, cannot be read through it.
"""

import asyncio
import os
import re
import time
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import copyfile
from stat import S_IFDIR
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from refitd_client import RefitError
from refitd_client.checkpoint.index import MAX_INDEX_BYTES, IndexOfDeltaError, IndexRefusedError, parse_index
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, components
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, parse_version_folder
from refitd_client.contract.states import VersionState
from refitd_client.errors import PublishError
from refitd_client.files.plain_file import read_plain
from refitd_client.front import ASK_SECONDS, NamedVersions
from refitd_client.http.publisher_client import open_client
from refitd_client.publish.publication import Publication

_NUMBERED_FOLDER = re.compile(r"weight_(?:update_)?v(\d{1,13})")
"""AReaL's, and slime's and miles'."""


class CheckpointRefusedError(ValueError):
    """The folder is not taken. The message is a sentence."""


@contextmanager
def plain_files_of(path: Path, root: Path) -> Generator[Path]:
    """Give a folder that shows the plain files of the folder `path`, as long as the context lasts.

    Args:
        path: the checkpoint's folder, beneath the root.
        root: the folder that checkpoints lie in, `root_of`. It may be a link itself: the operator named it.

    Raises:
        CheckpointRefusedError: the folder holds a link or a special file, or cannot be read.
    """
    place, read = str(path.relative_to(root)), path
    with ExitStack() as stack:
        view = Path(stack.enter_context(TemporaryDirectory(prefix="refitd-front-")))
        opened: dict[str, int] = {}
        try:
            folder = stack.enter_context(Folder(root, place))
            for name, file in folder.list().items():
                if file.kind != S_IFDIR:
                    read = path / name
                    opened[name] = stack.enter_context(folder.open(name, file))
        except (OpeningRefusedError, ChangedError) as error:
            raise CheckpointRefusedError(f"{path} is not taken: {error}") from error
        except OSError as error:
            raise unreadable(read, error) from error
        for name, descriptor in opened.items():
            (view / name).symlink_to(f"/proc/self/fd/{descriptor}")
        yield view


def unreadable(path: Path, error: OSError) -> CheckpointRefusedError:
    """Return the error that says which file or folder of a checkpoint cannot be read, as which user, and what to do."""
    if not isinstance(error, PermissionError):
        return CheckpointRefusedError(f"{path} cannot be read: {error.strerror}")
    closed = next((above for above in reversed(path.parents) if not os.access(above, os.X_OK)), path)
    return CheckpointRefusedError(
        f"{closed} cannot be read: {error.strerror}. 'refitd front' runs as user id {os.geteuid()}, group id "
        f"{os.getegid()}: give the trainer and it a common group and let the group read what the trainer saves "
        "(umask 027 in the trainer, or chmod -R g+rX), or run it as the trainer's user"
    )


def root_of(path: Path, roots: Sequence[Path]) -> Path:
    """Return the folder that checkpoints lie in which a path is beneath, by the path alone.

    Raises:
        CheckpointRefusedError: it is beneath none.
    """
    for root in roots:
        with suppress(ValueError):
            components(str(path.relative_to(root)))
            return root
    named = " or ".join(map(str, roots)) or "a folder that --checkpoints names, which names none"
    raise CheckpointRefusedError(
        f"{path} is not taken: checkpoints come from beneath {named} alone (--checkpoints), by a path without '..'"
    )


_Identity = tuple[object, ...]

log = structlog.get_logger("refitd")


class Versions:
    """The versions of one run, whose lock is held until `close`.

    Args:
        named: publishes them.
        checkpoints: the folders that checkpoints are taken from.
        base_model: the checkpoint that engines were started with, which patches change where the run has no version.
        timeout: seconds that an update waits for the engines.
    """

    def __init__(
        self,
        named: NamedVersions,
        *,
        checkpoints: Sequence[Path] = (),
        base_model: Path | None = None,
        timeout: float,
    ) -> None:
        self._named = named
        named.is_new_trainer = True  # it is started with its trainer
        self._checkpoints = checkpoints
        self._base_model = base_model
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._base: Path | None = None  # the files of what engines serve
        self._done: dict[_Identity, Publication] = {}
        self.under_way = 0
        self.served: str | None = None
        self._logged: object = None

    def open(self) -> None:
        """Take the run before the first checkpoint comes, and check the service's token.

        Raises:
            RefitError, OSError, ValueError: the run cannot be had, or the token cannot be one.
        """
        self._named.connection.headers()
        self._named.open()

    def begin_anew(self) -> None:
        """A trainer has made its group: the steps of its versions may begin again, in another generation of the run."""
        self._named.is_new_trainer = True

    def check_folder(self, path: Path) -> None:
        """Look whether a folder can be taken, by its path and without reading it.

        Raises:
            CheckpointRefusedError: it cannot.
        """
        if not path.is_absolute():
            raise CheckpointRefusedError(
                f"{str(path)!r} is no absolute path: the trainer and refitd may start from different folders"
            )
        root_of(path, self._checkpoints)

    async def look(self, path: Path) -> _Identity:
        """Look whether a folder can be taken, and is there; return what tells one content of it from the next.

        Raises:
            CheckpointRefusedError: it cannot, or is not.
        """
        self.check_folder(path)
        try:
            return await asyncio.to_thread(_identity, path)
        except OSError as error:
            raise unreadable(path, error) from error

    async def serve(self, path: Path, label: str | None = None) -> str | None:
        """Publish a folder, once for all calls, and wait until engines serve it; return why they do not, or None.

        The outcome is logged once for all calls that overlap.

        Args:
            label: the trainer's name of the version, its `weight_version`.
        """
        return await self._served(path, label, self._published(path, label))

    async def serve_received(self, folder: Path, label: str | None = None) -> str | None:
        """As `serve`, with a folder of this process's own."""
        return await self._served(folder, label, self._published_received(folder, label))

    async def _served(self, path: Path, label: str | None, published: Coroutine[Any, Any, Publication]) -> str | None:
        self.under_way += 1
        began, version = time.monotonic(), None
        try:
            publication = await published
            version = publication.version_id
            served = await publication.wait_async(self._timeout)
            self._log(path, version, began, engines=len(served.engines), outcome=served.outcome.value)
        except (RefitError, OSError, ValueError) as error:
            self._log(path, version, began, outcome="failed", error=str(error))
            return str(error)
        finally:
            self.under_way -= 1
            if not self.under_way:
                self._logged = None
        self._base, self.served = publication.path, str(publication.step) if label is None else label
        return None

    def _log(self, path: Path, version: str | None, began: float, **outcome: Any) -> None:
        if self._logged == (path, version, outcome):
            return
        self._logged = (path, version, outcome)
        tell = log.error if "error" in outcome else log.info
        seconds = round(time.monotonic() - began, 3)
        tell("the trainer's update", run=self._named.run, path=str(path), version=version, **outcome, seconds=seconds)

    async def _published(self, path: Path, label: str | None) -> Publication:
        async with self._turn:
            identity = (*await self.look(path), label)
            if identity not in self._done:
                self._done = {identity: await asyncio.to_thread(self._publish, path, label)}
            return self._done[identity]

    async def _published_received(self, folder: Path, label: str | None) -> Publication:
        async with self._turn:
            return await asyncio.to_thread(self._named.publish, folder, label)

    def _publish(self, path: Path, label: str | None) -> Publication:
        named = None if label is not None else _NUMBERED_FOLDER.fullmatch(path.name)
        with plain_files_of(path, root_of(path, self._checkpoints)) as view:
            try:
                return self._named.publish(self._weights_in(view), label, None if named is None else int(named[1]))
            except PublishError as error:
                raise PublishError(str(error).replace(str(view), str(path))) from error

    def _weights_in(self, view: Path) -> Path | Mapping[str, Any]:
        """The folder itself; where it holds a delta of slime's or miles', the weights that it leads to.

        Raises:
            CheckpointRefusedError: the weights that the delta changes are not here.
            InvalidWeightsError: the delta does not lead to what its checksums say.
        """
        try:
            parse_index(read_plain(view / INDEX_NAME, MAX_INDEX_BYTES + 1, follow=True))
        except IndexOfDeltaError:
            try:
                from refitd_client.trainers.slime import SlimeDelta, load_weights
            except ImportError as error:
                raise CheckpointRefusedError(
                    f"a delta is applied with torch and zstandard, and {error.name} is not here: install it beside "
                    "'refitd front', or have the trainer write full updates"
                ) from error
            delta = SlimeDelta(view)
            weights = load_weights(self._weights_of(delta.base))
            delta.apply(weights)
            return weights
        except (FileNotFoundError, IndexRefusedError):
            pass  # there is none, or the publisher says what is wrong with it
        return view

    def _weights_of(self, number: int) -> Path:
        """The checkpoint that a delta calls its base by this number."""
        if number == 0:
            if self._base_model is None:
                raise CheckpointRefusedError(
                    "a delta of version 000000 changes the checkpoint that the engines were started with: name it "
                    "(refitd front --base-model DIR)"
                )
            return self._base_model
        base = self._base or self._newest_good()
        order = None if base is None else parse_version_folder(base.name)
        if base is None or order is None or order.step != number:
            raise CheckpointRefusedError(
                f"a delta of version {number:06d} cannot be applied, which is not the newest good version here: start "
                "the trainer again, so that its first delta is one of version 000000, or have it write full updates"
            )
        return base

    async def copy_base(self, folder: Path) -> list[str]:
        """Copy the weights that patches are about into a folder; return the names of its safetensors files.

        Raises:
            CheckpointRefusedError: there are none.
            OSError: they cannot be copied.
        """
        return await asyncio.to_thread(self._copy_base, folder)

    def _copy_base(self, folder: Path) -> list[str]:
        base = self._base or self._newest_good() or self._base_model
        if base is None:
            raise CheckpointRefusedError(
                "a patch changes weights, and there are none yet: send a whole update first, or name the checkpoint "
                "that the engines were started with (refitd front --base-model DIR)"
            )
        with plain_files_of(base, base.parent) as view:
            for file in view.iterdir():
                if file.name != MANIFEST_NAME:
                    copyfile(file, folder / file.name)
        return sorted(file.name for file in folder.glob("*.safetensors"))

    def _newest_good(self) -> Path | None:
        with open_client(self._named.connection, try_for=ASK_SECONDS) as client:
            sealed = client.versions(self._named.run, state=VersionState.SEALED).items
        return next((self._named.root / version.path for version in sealed if not version.barred), None)

    def close(self) -> None:
        self._named.close()


def _identity(path: Path) -> _Identity:
    """Return what tells one content of a folder from the next: a trainer may write each into the same folder.

    Raises:
        OSError: it cannot be read.
    """
    with os.scandir(path) as entries:
        seen = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    files = sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in seen)
    return (str(path), path.stat().st_ino, *files)
