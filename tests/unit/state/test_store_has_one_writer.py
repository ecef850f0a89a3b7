"""Only the store changes what it holds: other parts read its attributes and call its methods."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import refitd

NAMES = frozenset({"store", "_store"})
CHANGES = frozenset({"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"})


def writes(source: str) -> list[int]:
    """The lines that assign to an attribute or an item of a store, delete one, or change a collection in it."""
    return sorted({target.lineno for node in ast.walk(ast.parse(source)) for target in _written(node)})


def _written(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from (target for each in targets for target in _flat(each) if _is_in_store(target))
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) if _is_in_store(target):
            yield target
        case ast.Call(func=ast.Attribute(value=collection, attr=attr)) if attr in CHANGES and _is_in_store(collection):
            yield collection
        case _:
            return


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    for each in target.elts if isinstance(target, ast.Tuple | ast.List) else ():
        yield from _flat(each)
    yield target


def _is_in_store(expression: ast.expr) -> bool:
    """Whether it is an attribute or an item of a store, at any depth: `self._store.runs.closed["run"]`."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
        match expression:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in NAMES:
                return True
            case _:
                pass
    return False


def test_no_part_of_the_service_but_the_store_changes_what_the_store_holds() -> None:
    product = Path(refitd.__file__).parent
    found = {str(file.relative_to(product)): writes(file.read_text()) for file in sorted(product.rglob("*.py"))}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "store.fault = None",
        "self._store.fault: str | None = None",
        "self._store.observers += [meters]",
        "before, store.left_out = store.left_out, 3",
        "self.entry.store.engines['a'] = engine",
        "del store.engines['a']",
        "store.runs.closed.pop('run')",
        "store.faults.root = 'it cannot be listed'",
    ],
)
def test_a_write_into_the_store_is_found(line: str) -> None:
    assert writes(line) == [1]


@pytest.mark.parametrize("line", ["self._store = store", "store.put_engine(engine)", "seen = store.changed.count"])
def test_what_is_no_write_is_not_taken_for_one(line: str) -> None:
    assert not writes(line)
