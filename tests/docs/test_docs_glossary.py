"""The glossary: few terms, a sentence each, and no package of the product whose name it does not explain."""

import re
from pathlib import Path

TREE = Path(__file__).parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (TREE / "docs/glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term ")
]


def packages() -> set[str]:
    """Every folder below the four kinds of packages that holds code or files of its own, but for the two outermost."""
    found = {
        folder.relative_to(top)
        for top in (TREE / "client", TREE / "service")
        for folder in top.rglob("*")
        if folder.is_dir() and any(child.is_file() for child in folder.iterdir())
    }
    names = {".".join(path.parts) for path in found if "__pycache__" not in path.parts and "vendor" not in path.parts}
    return names - {"refitd", "refitd_client"}


def test_each_term_has_one_sentence() -> None:
    for term, meaning, _ in ROWS:
        assert re.fullmatch(r"[A-Z][^.]*\.", meaning), term


def test_each_package_is_named_after_a_term() -> None:
    named = [name for _, _, cell in ROWS for name in re.findall(r"`(.+?)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) == packages()
