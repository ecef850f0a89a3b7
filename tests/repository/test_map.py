"""The folders of the tests: where the tests of a package are, and what a unit test does not start."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
TREE = TESTS.parent
PRODUCT = {
    "client/refitd_client": None,
    "service/refitd": None,
    "service/refitd_doctor": "diagnose",
    "service/refitd_embedded": "embedded",
    "service/refitd_front": None,
    "service/refitd_hosts": None,
    "service/refitd_inside": None,
    "service/refitd_plan": "plan",
    "service/refitd_plugin": "plugin",
    "service/refitd_sglang": "sglang",
    "service/refitd_vllm": "vllm",
}
FOLDERS = {"unit", "integration", "reliability", "e2e", "docs", "repository", "bench", "browser", "gpu"}
KITS = {
    "areal",
    "azure",
    "core",
    "envoy",
    "lowest",
    "nginx",
    "postgres",
    "prometheus",
    "s3",
    "sglang",
    "support",
    "trainers",
    "vllm",
}  # what tests are made with
PARTS = {
    "integration": {"contract", "embedded", "hosts", "plugin", "processes", "surface"},
    "reliability": {"attack", "chaos", "crash", "faults", "mutants", "simulation", "takeover"},
}
ENGINES = {"refitd_embedded", "sglang", "vllm"}
HELPERS = {".".join(each.relative_to(TESTS).with_suffix("").parts) for each in TESTS.rglob("*.py")}


def folders_in(place: Path) -> set[str]:
    """The folders with a file in them; caches of Python are none."""
    files = (each for each in place.rglob("*") if each.is_file() and "__pycache__" not in each.parts)
    return {file.relative_to(place).parts[0] for file in files if file.parent != place}


def test_the_folders_of_the_tests_are_those_of_the_map() -> None:
    """Folders of these names alone: a test that fits in none of them wants a folder with a name and a line here."""
    assert folders_in(TESTS) == FOLDERS | KITS
    for folder, parts in PARTS.items():
        assert folders_in(TESTS / folder) == parts


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names, and stops where all folders are collected at once and two names are one."""
    names = Counter(file.name for file in TESTS.rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_unit_tests_lie_in_folders_of_the_product_s_packages() -> None:
    packages = {name for name in PRODUCT.values() if name}
    for place in (TREE / folder for folder, name in PRODUCT.items() if name is None):
        packages |= {each.parent.name for each in place.glob("*/__init__.py")} | {
            each.stem for each in place.glob("*.py")
        }
    assert folders_in(TESTS / "unit") <= packages
    assert [file.name for file in (TESTS / "unit").glob("*.py")] == ["conftest.py"]


@cache
def imported(file: Path) -> set[str]:
    """Every module that a file names in an import, also within a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = f"{file.parent.name}.{node.module}" if node.level else node.module
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


@cache
def helpers(file: Path) -> list[Path]:
    """The modules of `tests` that a file imports."""
    return [TESTS.joinpath(*module.split(".")).with_suffix(".py") for module in imported(file) if module in HELPERS]


def reached(file: Path) -> set[Path]:
    """A file and the modules of `tests` that it imports, itself and through others of them."""
    seen, left = {file}, [file]
    while left:
        new = set(helpers(left.pop())) - seen
        seen |= new
        left += new
    return seen


def test_no_unit_test_imports_an_engine_or_starts_the_process_of_one() -> None:
    """Processes of engines and of the service are started through `support.servers`, by every test that has one."""
    for file in sorted((TESTS / "unit").rglob("*.py")):
        found = {module for each in reached(file) for module in imported(each)}
        assert not {module for module in found if module.partition(".")[0] in ENGINES}, file
        assert "support.servers" not in found, file
