"""Where the version of a notice lies, and which version that is. Pure: nothing is looked at."""

import os
from collections.abc import Collection
from pathlib import Path

from refitd.problem import ProblemError, Slug
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, Order, parse_version_folder
from refitd_client.validation.conventions import Trainer, recognise


def relative_path(path: str, root: Path) -> str:
    """Return a notice's path, absolute or relative, as one relative to the root. Links are not followed or looked at.

    Raises:
        ProblemError: it leads out of the root, is the root, or is a folder that is not a version's.
    """
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    parts = inside.split(os.sep)
    if "\0" in path or parts[0] == os.pardir:
        raise ProblemError(Slug.PATH_OUTSIDE_ROOT, f"{path!a} is not beneath the root {root}: publish into the root")
    if inside == os.curdir or any(part == SERVICE_FOLDER or part.startswith(INCOMING_PREFIX) for part in parts):
        raise ProblemError(Slug.PATH_OUTSIDE_ROOT, f"{path!a} is no version's directory")
    return inside


def order_of(path: str, run: str, step: int, generation: int, trainers: Collection[Trainer] = ()) -> Order:
    """Return the order of the version at `path`: that of its directory's name, else the notice's.

    A directory that the scan finds by its trainer's name for it has to be announced as what the scan takes it for.

    Args:
        path: the directory, relative to the root.
        run: the notice's run.
        step: the notice's step.
        generation: the run's current generation.
        trainers: those whose own folders count as versions.

    Raises:
        ProblemError: the directory's name is that of another step or run.
    """
    folder, _, name = path.rpartition("/")
    order = parse_version_folder(name)
    if order is None:
        foreign = recognise(path, trainers)
        if foreign is not None and (foreign.run, foreign.step) != (run, step):
            raise ProblemError(
                Slug.BAD_NAME,
                f"{path} is found as run {foreign.run}, step {foreign.step} (--trainers), and not {run}, {step}",
            )
        return Order(generation, step)
    if folder != run or order.step != step:
        raise ProblemError(
            Slug.BAD_NAME,
            f"{path} is the directory of run {folder or '(none)'}, step {order.step}, not of {run}, {step}",
        )
    return order
