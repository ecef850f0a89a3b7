"""Records that consist of parts: small records, so that each fact has one place. A fact is changed by its name."""

from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar, Self, cast


class Parted:
    """Base of a dataclass. Its fields are facts, and those that `PARTS` names are dataclasses of facts.

    No two facts of a record have one name.
    """

    __slots__ = ()
    PARTS: ClassVar[tuple[str, ...]] = ()

    def having(self, **facts: Any) -> Self:
        """The record with other facts, each in the part that has it.

        Raises:
            TypeError: no part has a fact of that name.
        """
        own: dict[str, Any] = {}
        changes: dict[str, dict[str, Any]] = {}
        kinds: tuple[Any, ...] = tuple(getattr(self, part).__class__ for part in self.PARTS)
        places = _places(self.PARTS, kinds)
        for name, fact in facts.items():
            part = places.get(name)
            if part is None:
                own[name] = fact
            else:
                changes.setdefault(part, {})[name] = fact
        for part, changed in changes.items():
            own[part] = replace(own.get(part, getattr(self, part)), **changed)
        return cast("Self", replace(cast("Any", self), **own))


@cache
def _places(parts: tuple[str, ...], kinds: tuple[Any, ...]) -> dict[str, str]:
    """The part of each fact that is not the record's own."""
    return {each.name: part for part, kind in zip(parts, kinds, strict=True) for each in fields(kind)}
