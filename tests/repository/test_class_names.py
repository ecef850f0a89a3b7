"""A public class name has one meaning: a reader of another file or of a traceback knows which class it is."""

import ast
from collections import defaultdict
from pathlib import Path

TREE = Path(__file__).parents[2]


def test_no_two_public_classes_of_the_product_have_one_name() -> None:
    """Neither in two packages nor beside each other in adapters of two kinds of engines, where both are imported."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in (each for top in ("client", "service") for each in (TREE / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(TREE)))
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
