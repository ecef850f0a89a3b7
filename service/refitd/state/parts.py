"""Records that consist of parts: small records, so that each fact has one place. A fact is changed by its name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar, Self, cast


class Parted:
    """Base of a dataclass. Its fields are facts, and those that `PARTS` names are dataclasses of facts.

    No two facts of a record have one name. Each part has a default.
    """

    __slots__ = ()
    PARTS: ClassVar[tuple[str, ...]] = ()

    def having(self, **facts: Any) -> Self:
        """The record with other facts, each in the part that has it.

        Raises:
            TypeError: no part has a fact of that name.
        """
        changed = in_parts(facts, type(self))
        for part in changed.keys() & set(self.PARTS) - facts.keys():
            changed[part] = replace(getattr(self, part), **changed[part])
        return cast("Self", replace(cast("Any", self), **changed))


def in_parts(facts: Mapping[str, Any], kind: type[Parted]) -> dict[str, Any]:
    """Facts of a record of a kind: those of a part in a dictionary by the part's name, the record's own beside it."""
    places, found = _places(kind), dict[str, Any]()
    for name, fact in facts.items():
        part = places.get(name)
        if part is None:
            found[name] = fact
        else:
            found.setdefault(part, {})[name] = fact
    return found


@cache
def _places(kind: type[Parted]) -> dict[str, str]:
    """The part of each fact that is not the record's own."""
    parts = [(each.name, each.default) for each in fields(cast("Any", kind)) if each.name in kind.PARTS]
    return {each.name: name for name, part in parts for each in fields(cast("Any", part))}
