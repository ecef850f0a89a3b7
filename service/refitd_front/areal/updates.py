"""AReaL's checkpoints become versions: held in the root before AReaL deletes them, and served before it goes on.

AReaL tells every engine of one update at about the same time, tries again when an answer is lost, and deletes the
folder when all have answered. So the first call publishes a copy of the folder (a clone, where the file system shares
blocks), and every call waits until engines serve it. The step is in the folder's name; the old layout has one for all.

The network asks a facade to read a folder and to publish it. A link in that folder could lead to any file that the
facade's user can read, and other users read a version's files. So every file is opened beneath the folder that the
operator named, from one descriptor to the next, without following links. The publisher gets a folder of our own, in
which each name leads to the open descriptor: files that change meanwhile, and other paths, cannot be read through it.
"""

import asyncio
import os
import re
import time
from collections.abc import Coroutine, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from stat import S_IFDIR
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from refitd_client import PublishOptions, RefitError, ServiceError, WeightPublisher
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, components
from refitd_client.errors import PublishError
from refitd_client.http.connection import connect_to
from refitd_client.publish.publication import Publication
from refitd_client.publish.run_folder import newest_in


class CheckpointRefusedError(ValueError):
    """The folder is not taken. The message is a sentence."""


@contextmanager
def plain_files_of(path: Path, root: Path) -> Generator[Path]:
    """Give a folder that shows the plain files of the folder `path`, as long as the context lasts.

    Args:
        path: the checkpoint's folder, an absolute path.
        root: the folder that checkpoints lie in. It may be a link itself: the operator named it.

    Raises:
        CheckpointRefusedError: the folder is not beneath the root, holds a link or a special file, or cannot be read.
    """
    place, read = place_of(path, root), path
    with ExitStack() as stack:
        view = Path(stack.enter_context(TemporaryDirectory(prefix="refitd-areal-")))
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
        f"{closed} cannot be read: {error.strerror}. 'refitd areal' runs as user id {os.geteuid()}, group id "
        f"{os.getegid()}: give the trainer and it a common group and let the group read what the trainer saves "
        "(umask 027 in the trainer, or chmod -R g+rX), or run it as the trainer's user"
    )


def place_of(path: Path, root: Path) -> str:
    """Return where a folder lies beneath the root, by its path alone.

    Raises:
        CheckpointRefusedError: it is elsewhere.
    """
    try:
        place = str(path.relative_to(root))
        components(place)
    except ValueError:
        raise CheckpointRefusedError(
            f"{path} is not taken: checkpoints come from beneath {root} alone (--checkpoints), by a path without '..'"
        ) from None
    return place


_AREAL_FOLDER = re.compile(r"weight_update_v(\d{1,13})")
_FolderId = tuple[str, int, int]

log = structlog.get_logger("refitd")


class Updates:
    """The versions of one run, whose lock is held until `close`. `under_way` counts the updates that are waited for,
    each for `timeout` seconds. No checkpoint from outside the folder `checkpoints` is taken.
    """

    def __init__(
        self, root: Path, run: str, service_url: str, *, checkpoints: Path, timeout: float, token_file: Path | None
    ) -> None:
        self._root = root
        self._run = run
        self._checkpoints = checkpoints
        self._url = service_url
        self._timeout = timeout
        self._token_file = token_file
        self._turn = asyncio.Lock()
        self._publisher: WeightPublisher | None = None
        self._newest: int | None = None
        self._done: dict[_FolderId, Publication] = {}
        self.under_way = 0
        self._logged: object = None

    def open(self) -> None:
        """Take the run before the first checkpoint comes, and check the service's URL and token.

        Raises:
            RefitError, OSError, ValueError: the run cannot be had, or the URL or the token cannot be one.
        """
        connect_to(self._url, token_file=self._token_file).headers()
        self._taken()

    def _taken(self) -> WeightPublisher:
        if self._publisher is None:
            self._publisher = WeightPublisher(
                self._root, self._run, self._url, options=PublishOptions(token_file=self._token_file)
            )
        return self._publisher

    async def serve(self, path: Path) -> str | None:
        """Publish a folder, once for all calls, and wait until engines serve it; return why they do not, or None.

        The outcome is logged once for all engines whose calls overlap.
        """
        return await self._served(path, self._published(path))

    async def serve_received(self, folder: Path) -> str | None:
        """As `serve`, with a folder of this process's own, as the step after the run's newest."""
        return await self._served(folder, self._published_received(folder))

    async def _served(self, path: Path, published: Coroutine[Any, Any, Publication]) -> str | None:
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
        return None

    def _log(self, path: Path, version: str | None, began: float, **outcome: Any) -> None:
        if self._logged == (path, version, outcome):
            return
        self._logged = (path, version, outcome)
        tell = log.error if "error" in outcome else log.info
        seconds = round(time.monotonic() - began, 3)
        tell("AReaL's update", run=self._run, path=str(path), version=version, **outcome, seconds=seconds)

    async def _published(self, path: Path) -> Publication:
        async with self._turn:
            place_of(path, self._checkpoints)
            try:
                status = await asyncio.to_thread(os.stat, path)
            except OSError as error:
                raise unreadable(path, error) from error
            folder = (str(path), status.st_ino, status.st_mtime_ns)
            if folder not in self._done:
                self._done = {folder: await asyncio.to_thread(self._publish, path)}
            return self._done[folder]

    async def _published_received(self, folder: Path) -> Publication:
        async with self._turn:
            return await asyncio.to_thread(lambda: self._publish_step(folder, self._next_step()))

    def _publish(self, path: Path) -> Publication:
        step = self._step_of(path)
        with plain_files_of(path, self._checkpoints) as view:
            if self._newest is not None and step <= self._newest:
                self.close()  # the trainer has begun again: another publisher begins another generation
            try:
                return self._publish_step(view, step)
            except PublishError as error:
                raise PublishError(str(error).replace(str(view), str(path))) from error

    def _publish_step(self, folder: Path, step: int) -> Publication:
        try:
            publication = self._taken().publish(folder, step=step)
        except ServiceError as error:
            if not isinstance(error.publication, Publication):
                raise
            # The version stands, and only its notice was refused: the wait for it tells the service again, and
            # raises the cause. To publish the step again would be a conflict, and hide the cause.
            publication = error.publication
        self._newest = step
        return publication

    def _step_of(self, path: Path) -> int:
        """Return the number in the folder's name; in the old layout the one after the newest published step."""
        if (named := _AREAL_FOLDER.fullmatch(path.name)) is not None:
            return int(named[1])
        return self._next_step()

    def _next_step(self) -> int:
        if self._newest is not None:
            return self._newest + 1
        run = self._root / self._run
        newest = newest_in(run) if run.is_dir() else None
        return 1 if newest is None else newest.step + 1

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher, self._newest = None, None
