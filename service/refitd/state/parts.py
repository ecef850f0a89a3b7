"""Records that consist of parts: small records, so that each fact has one place. A fact is changed by its name."""

from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Self, cast


class Parted:
    """Base of a dataclass. Its fields are facts, and those that `PARTS` names are dataclasses of facts.

    No two facts of a record have one name. Each part has a default.
    """

    __slots__ = ()
    PARTS: ClassVar[tuple[str, ...]] = ()

    def having(self, **facts: Any) -> Self:
        """The record with other facts, each in the part that has it. A TypeError says that no part has a fact of that
        name.
        """
        places, changed = _places(type(self)), dict[str, Any]()
        in_parts: dict[str, dict[str, Any]] = {}
        for name, fact in facts.items():
            (in_parts.setdefault(places[name], {}) if name in places else changed)[name] = fact
        for part, found in in_parts.items():
            changed[part] = replace(getattr(self, part), **found)
        return cast("Self", replace(cast("Any", self), **changed))


def fact(path: str) -> Any:
    """A property that many ask for, by its place in the parts."""
    return property(attrgetter(path))


@cache
def _places(kind: type[Parted]) -> dict[str, str]:
    """The part of each fact that is not the record's own."""
    parts = [(each.name, each.default) for each in fields(cast("Any", kind)) if each.name in kind.PARTS]
    return {each.name: name for name, part in parts for each in fields(cast("Any", part))}
