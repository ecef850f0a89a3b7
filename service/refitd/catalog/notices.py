"""Checks of a notice: the path that it names, and how much it may bring. Pure.

What a notice brings stays in memory and in the journal as long as its version, so it is limited.
"""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from refitd.policy.admit import LIMITS, fits
from refitd.problem import ProblemError, Slug
from refitd_client.contract.naming import INCOMING_PREFIX, SERVICE_FOLDER, Order, parse_version_folder
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice
from refitd_client.validation.conventions import Trainer, recognise

MAX_BASE = 512
MAX_PATH = 4096
MAX_FAILED = 500
MAX_DIGEST = 200
MAX_ROOT = 64
MAX_PUBLISH_MS = 86_400_000.0  # a day
_OFFER = re.compile(r"\.offer-[0-9a-f]{16}")


def check_caps(notice: Notice) -> None:
    """Refuse fields that are longer than is kept.

    Raises:
        ProblemError: it names the field and its limit.
    """
    check_metadata(notice.metadata)
    if notice.path is not None and len(notice.path) > MAX_PATH:
        raise ProblemError(Slug.BAD_REQUEST, f"path is longer than {MAX_PATH} characters")
    if notice.base is not None and len(notice.base) > MAX_BASE:
        raise ProblemError(Slug.BAD_REQUEST, f"base is a version's id, of at most {MAX_BASE} characters")
    if len(notice.digest or "") > MAX_DIGEST or len(notice.root or "") > MAX_ROOT:
        raise ProblemError(Slug.BAD_REQUEST, f"digest has at most {MAX_DIGEST} characters, and root {MAX_ROOT}")
    if notice.publish_ms is not None and not 0 <= notice.publish_ms <= MAX_PUBLISH_MS:
        raise ProblemError(Slug.BAD_REQUEST, f"publish_ms is between 0 and {MAX_PUBLISH_MS:g} milliseconds")


def check_handover(notice: Notice) -> None:
    """Refuse an offer or a failure of anything but a hand-over, and a hand-over with neither.

    Raises:
        ProblemError: it says what is wrong.
    """
    said = [each for each in (notice.offer, notice.failed) if each is not None]
    if len(said) != (notice.kind is Kind.HANDOVER):
        raise ProblemError(Slug.BAD_REQUEST, "a hand-over names an offer, or says why it failed; nothing else does")
    if notice.offer is not None and not _OFFER.fullmatch(notice.offer):
        raise ProblemError(Slug.BAD_REQUEST, f"offer {notice.offer[:50]!a} is no name of an offer's file")
    if notice.failed is not None and len(notice.failed) > MAX_FAILED:
        raise ProblemError(Slug.BAD_REQUEST, f"failed is longer than {MAX_FAILED} characters")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata of one version, from one notice or several, that is more than is kept.

    Raises:
        ProblemError: it says the limits.
    """
    if not fits(metadata):
        raise ProblemError(
            Slug.BAD_REQUEST,
            f"the metadata of a version has at most {LIMITS}: put the rest into a file beside the weights",
        )


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
