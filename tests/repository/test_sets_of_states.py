"""A set of states has one name, on its enum: a module that defines its own soon means something else by that name."""

import ast
from collections import Counter
from collections.abc import Iterator
from enum import EnumType, StrEnum
from functools import cached_property
from pathlib import Path

from refitd_client.contract import states

TREE = Path(__file__).parents[2]
KINDS = ("State", "Outcome", "Standing")
TREES = {file: ast.parse(file.read_text()) for top in ("client", "service") for file in (TREE / top).rglob("*.py")}


def _enums() -> dict[str, Path]:
    """The enums of states, and the modules that define them."""
    return {
        node.name: file
        for file, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and node.name.endswith(KINDS)
        and "Enum" in "".join(map(ast.unparse, node.bases))
    }


def _states_in(node: ast.AST) -> frozenset[str]:
    """The members that a set, tuple or list consists of, as `Enum.MEMBER`; none where it has anything else."""
    each = [ast.unparse(element) for element in node.elts] if isinstance(node, ast.Set | ast.Tuple | ast.List) else []
    return frozenset(each if all(name.partition(".")[0] in ENUMS for name in each) else ())


def _constants(body: list[ast.stmt]) -> Iterator[ast.Assign | ast.AnnAssign]:
    """What a module defines, and its classes."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _constants(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield node


def _named() -> dict[frozenset[str], str]:
    """The sets that have a name, and their complements."""
    found: dict[frozenset[str], str] = {}
    for name, enum in vars(states).items():
        if not isinstance(enum, EnumType) or enum is StrEnum:
            continue
        for each in (key for key, value in vars(enum).items() if isinstance(value, cached_property)):
            for truth in (True, False):
                members = frozenset(f"{name}.{member.name}" for member in enum if getattr(member, each) is truth)
                assert found.setdefault(members, each) == each, "two names mean the same"
    return found


ENUMS = _enums()


def test_no_module_defines_a_set_of_states_of_its_own() -> None:
    found = [
        f"{file.relative_to(TREE)}:{constant.lineno}"
        for file, tree in TREES.items()
        for constant in _constants(tree.body)
        for node in ast.walk(constant)
        if (members := _states_in(node)) and file not in {ENUMS[each.partition(".")[0]] for each in members}
    ]
    assert found == []
    assert {"EngineState", "VersionState", "UpdateState", "OrderState", "UpdateOutcome", "Outcome"} <= ENUMS.keys()


def test_what_a_line_asks_of_a_state_has_no_name_on_its_enum_and_is_asked_nowhere_else() -> None:
    named = _named()
    asked = Counter(
        members
        for file, tree in TREES.items()
        if file != Path(states.__file__)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and (members := _states_in(node.comparators[0]))
    )
    assert {named[each] for each in asked if each in named} == set()
    assert [sorted(each) for each, count in asked.items() if count > 1] == []
