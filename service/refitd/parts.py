"""What the outer rings add to the core. The core names none of them.

A ring registers a `Part` as an entry point of the group `refitd.parts` in pyproject.toml. A tree without the ring has
no such entry point, and everything else works. A value that is text, `module:name`, names an object of the ring. That
object is imported when it is needed: `refitd --help` imports no ring.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any

from refitd_client.parts import entry_points

GROUP = "refitd.parts"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command of the command line.

    Attributes:
        panel: under which `refitd --help` lists it.
        module: has the command, as a function of the command's name or as a group called `app`.
        line: what the list says of it.
        is_first: whether `refitd --help` shows it; `refitd help all` shows all.
        words: names that other tools give to the same command.
    """

    panel: str
    module: str
    line: str
    is_first: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one ring adds.

    Attributes:
        commands: of the command line, by name.
        settings: groups of settings of `refitd serve`: classes with `panels` (which of them --help shows under which
            heading) and `values` (the placeholder of a value, where its type does not say it).
        routes: of the API: an APIRouter each.
        compose: adds to a service before it runs: a `refitd.composition.Compose`.
        group: has a service wait until it may act, where it is one of several: a `refitd.composition.FindGroup`.
        words: what is said of engines that are hosts: a `refitd.explain.hosts.HostWords`.
        plugins: makes the clients of the code inside engines: a `refitd.engine.plugin.PluginMaker`.
    """

    commands: Mapping[str, CommandLine] = field(default_factory=dict[str, CommandLine])
    settings: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    compose: str | None = None
    group: str | None = None
    words: str | None = None
    plugins: str | None = None


@cache
def parts() -> tuple[Part, ...]:
    """Return the parts of the rings that are there, by the names of their entry points."""
    return tuple(entry.load() for entry in sorted(entry_points(GROUP), key=lambda entry: entry.name))


def registered(attribute: str) -> Iterable[Any]:
    """Return the objects that the parts name in this attribute, imported."""
    return [resolve_name(name) for part in parts() if (name := getattr(part, attribute)) is not None]
