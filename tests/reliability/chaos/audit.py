"""The look at everything when the killing is over: versions lost, versions leaked, engines left paused."""

import os
import time
from pathlib import Path

from chaos.book import RUN, Book
from chaos.reference import answer_now
from chaos.stack import Stack
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import ReclaimPlan, Version
from refitd_client.errors import NotFoundError

SETTLES_WITHIN = 30.0
_TWO_DAYS = 2 * 86_400
OWN = {f"{RUN}/.publisher.lock", f"{RUN}/.publisher.json"}


def reclaim(stack: Stack) -> ReclaimPlan:
    """Have everything collected that the rules let go; the last plan."""
    # A folder whose publisher died before it had a lock goes when it is a day old: it is made older here.
    for path in stack.root.rglob(".incoming-*/**/*"):
        os.utime(path, (time.time() - _TWO_DAYS,) * 2)
    ends = time.monotonic() + SETTLES_WITHIN
    while True:
        plan = stack.client.reclaim()
        waits = [item for item in plan.items if not item.keep or item.version is None]
        if not waits or time.monotonic() > ends:
            return stack.client.reclaim_plan()
        time.sleep(0.5)


def lost(stack: Stack) -> list[str]:
    """Versions that got their name and are neither there nor collected by the rules, each with what is wrong."""
    found: list[str] = []
    for published in sorted(stack.book.versions):
        try:
            version = stack.client.version(published.id)
        except NotFoundError:
            found.append(f"{published.id}: the service knows nothing of it")
            continue
        if (wrong := _is_lost(stack, version, stack.run_folder / published.name)) is not None:
            found.append(f"{published.id}: {wrong}")
    return found


def _is_lost(stack: Stack, version: Version, folder: Path) -> str | None:
    recorded = stack.follower.find(lambda event: event.subject == version.id and event.text == "deleted", 0) is not None
    match version.state:
        case VersionState.SEALED:
            return None if folder.is_dir() else "it counts as good, and its folder is gone"
        case VersionState.DELETED:
            if folder.exists():
                return "it counts as deleted, and its folder is there"
            return None if recorded else "it is deleted, and no event says so"
        case state:
            return f"it is {state}: {version.reason}"


def leaked(root: Path, plan: ReclaimPlan, book: Book) -> list[str]:
    """What lies under the root and belongs to nobody: paths."""
    kept = {item.path for item in plan.items if item.keep and item.version is not None}
    known = {f"{RUN}/{version.name}" for version in book.versions}
    return [path for path in _entries(root) if path not in OWN and not (path in kept and path in known)]


def _entries(root: Path) -> list[str]:
    """Everything in the run's folder and in the trash, and what is in the root and should not be."""
    top = [path for path in root.iterdir() if path.name not in {SERVICE_FOLDER, RUN.partition("/")[0]}]
    places = [root / RUN, (root / RUN).parent, root / SERVICE_FOLDER / "trash"]
    inside = [path for place in places if place.is_dir() for path in place.iterdir() if path != root / RUN]
    return sorted(str(path.relative_to(root)) for path in [*top, *inside])


def left_paused(stack: Stack) -> list[str]:
    """Engines that do not answer as the newest version, or count as paused."""
    wanted = stack.reference.expected(stack.book.newest.model, 0)
    paused = [engine.url for engine in stack.client.engines().items if engine.paused]
    return [
        name
        for name, engine in stack.engines.items()
        if engine.url in paused or answer_now(name, engine.url, 0) != wanted
    ]
