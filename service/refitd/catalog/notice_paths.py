"""Where a notice says its version is. Pure: words in, a path relative to the root out."""

import os
from collections.abc import Collection
from pathlib import Path

from refitd.problem import Kind, ProblemError
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, Order, parse_version_folder
from refitd_client.validation.conventions import Trainer, recognise


def relative_path(path: str, root: Path) -> str:
    """The path beneath `root` that a notice means, given absolute or relative. Links are not looked at here.

    Raises:
        ProblemError: it leads out of the root, is the root, or is a folder that is not a version's.
    """
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    parts = inside.split(os.sep)
    if "\0" in path or parts[0] == os.pardir:
        raise ProblemError(Kind.PATH_OUTSIDE_ROOT, f"{path!a} is not beneath the root {root}: publish into the root")
    if inside == os.curdir or any(part == SERVICE_FOLDER or part.startswith(INCOMING_PREFIX) for part in parts):
        raise ProblemError(Kind.PATH_OUTSIDE_ROOT, f"{path!a} is no version's directory")
    return inside


def order_of(path: str, run: str, step: int, generation: int, trainers: Collection[Trainer] = ()) -> Order:
    """The order of the version at `path`: its directory says it where it has a version's name, else the notice does.

    A directory that the watch finds by its trainer's name for it is no other version when it is announced.

    Raises:
        ProblemError: the directory's name is that of another step or run.
    """
    folder, _, name = path.rpartition("/")
    order = parse_version_folder(name)
    if order is None:
        foreign = recognise(path, trainers)
        if foreign is not None and (foreign.run, foreign.step) != (run, step):
            raise ProblemError(
                Kind.BAD_NAME,
                f"{path} is found as run {foreign.run}, step {foreign.step} (--trainers), and not {run}, {step}",
            )
        return Order(generation, step)
    if folder != run or order.step != step:
        raise ProblemError(
            Kind.BAD_NAME,
            f"{path} is the directory of run {folder or '(none)'}, step {order.step}, not of {run}, {step}",
        )
    return order
