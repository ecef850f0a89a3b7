"""Into types of ours is decoded in one place: `refitd_client.contract.decoding` says why."""

import ast
from pathlib import Path

TREE = Path(__file__).parents[2]
PLACE = TREE / "client/refitd_client/contract/decoding.py"
PLAIN = {"dict[str, Any]", "str"}  # msgspec keeps nothing of these


def _is_unsafe(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    kinds = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "type"]
    return name in {"convert", "Decoder"} or (name == "decode" and not PLAIN.issuperset(kinds))


def test_into_a_type_is_decoded_only_where_it_was_made_known_before() -> None:
    found = [
        f"{file.relative_to(TREE)}:{node.lineno}"
        for top in ("client", "service")
        for file in (TREE / top).rglob("*.py")
        if file != PLACE
        for node in ast.walk(ast.parse(file.read_text()))
        if _is_unsafe(node)
    ]
    assert found == []
    assert any(_is_unsafe(node) for node in ast.walk(ast.parse(PLACE.read_text())))
