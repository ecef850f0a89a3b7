"""A checkpoint's folder, taken as data: whatever its owner puts there, only its own plain files are read.

A facade is asked by the network to read a folder and to publish what it finds. A link in that folder could lead to any
file that the facade's user can read, and the version's files are read by others. So every file is opened beneath the
folder that the operator named, from one descriptor to the next, without following links. The publisher then gets a
folder of our own, in which each name leads to the descriptor that was opened: nothing that changes meanwhile, and no
other path, can be read through it.
"""

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
        CheckpointRefusedError: the folder is not beneath the root, or holds a link or a special file.
        OSError: it cannot be read.
    """
    place = place_of(path, root)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(Folder(root, place))
            view = Path(stack.enter_context(TemporaryDirectory(prefix="refitd-areal-")))
            for name, file in folder.list().items():
                if file.kind != S_IFDIR:
                    opened = stack.enter_context(folder.open(name, file))
                    (view / name).symlink_to(f"/proc/self/fd/{opened}")
        except (OpeningRefusedError, ChangedError) as error:
            raise CheckpointRefusedError(f"{path} is not taken: {error}") from error
        yield view


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
