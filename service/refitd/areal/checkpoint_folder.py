"""A checkpoint's folder, taken as data: whatever its owner puts there, only its own plain files are read.

A facade is asked by the network to read a folder and to publish what it finds. A link in that folder could lead to any
file that the facade's user can read, and the version's files are read by others. So every file is opened beneath the
folder that the operator named, from one descriptor to the next, without following links. The publisher then gets a
folder of our own, in which each name leads to the descriptor that was opened: nothing that changes meanwhile, and no
other path, can be read through it.
"""

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from stat import S_IFDIR
from tempfile import TemporaryDirectory

from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError, components


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
    """Where a folder is beneath the root, by its name alone.

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
