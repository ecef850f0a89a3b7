"""A private constant has one meaning in the product: of a name that stands in two modules each would mean its own."""

import ast
from collections import defaultdict
from pathlib import Path

TREE = Path(__file__).parents[2]


def _constants(file: Path) -> set[str]:
    """The private constants that a module defines: no type variables, which have a name of their own to say so."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            found |= set() if ast.unparse(node.value).startswith("TypeVar(") else names
    return {name for name in found if name.startswith("_") and name.isupper()}


def test_no_two_modules_of_the_product_have_a_private_constant_of_one_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in (each for top in ("client", "service") for each in (TREE / top).rglob("*.py")):
        for name in _constants(file):
            places[name].append(str(file.relative_to(TREE)))
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
