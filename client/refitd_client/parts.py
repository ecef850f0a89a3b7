"""What the SDK's rings add to publishing and to validation. The core names none of them.

A ring registers an object as an entry point of the group `refitd_client.parts` in pyproject.toml. The name of the entry
point says what the object is for, and `refitd_client.publish.ports` or the module that asks has its protocol:

    deltas        makes deltas of a publisher's versions
    delta-checks  finds a delta's faults
    memory        brings versions to engines from the trainer's memory
    ranks         publishes what several ranks of a trainer have
    sources       reads sources of weights, as vLLM's trainers have them
    stores        publishes into an object store

A tree without a ring has no such entry point, and everything else works. The object is imported when it is needed.
"""

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

GROUP = "refitd_client.parts"


@cache
def part(name: str) -> Any | None:
    """Return the object that a ring registers under this name, imported; None in a tree without the ring."""
    found = next((entry for entry in entry_points(GROUP) if entry.name == name), None)
    return None if found is None else found.load()


@cache
def entry_points(group: str) -> Iterable[EntryPoint]:
    """Return those of this checkout's pyproject.toml, which an installation may be older than; else the installed."""
    if (named := _of_checkout(Path(__file__).parents[2] / "pyproject.toml")) is not None:
        return [EntryPoint(name, value, group) for name, value in named.get(group, {}).items()]
    try:
        return distribution("refitd").entry_points.select(group=group)
    except PackageNotFoundError:
        return ()


def _of_checkout(file: Path) -> dict[str, dict[str, str]] | None:
    """Return the entry points by group; None where the file is not there, or another project's."""
    try:
        project = tomllib.loads(file.read_text())["project"]
        return project["entry-points"] if project["name"] == "refitd" else None
    except (OSError, ValueError, KeyError):
        return None
