"""What pages show can be typed: shell that parses, options and verbs that there are, Python that compiles.

What is run besides is `test_docs_run.py`'s and `test_docs_publishing.py`'s business.
"""

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import EXECUTABLE, PAGES, SHELL, Block, blocks_of, lines_of, name_of
from command_lines import faults

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHOWN = [block for block in BLOCKS if block.language in EXECUTABLE]
KNOWN = EXECUTABLE | {"text", "yaml", "json", "mermaid", "{toctree}", "flat", "gap", ""}


def of(*languages: str) -> list[object]:
    """The blocks in these languages, each a case."""
    return [pytest.param(block, id=str(block)) for block in SHOWN if block.language in languages]


def test_every_block_says_what_it_is() -> None:
    assert not [f"{block} is '{block.language}'" for block in BLOCKS if block.language not in KNOWN]


def test_no_command_hides_in_a_block_without_a_language() -> None:
    """Four spaces make a block as well, and nobody would try it."""
    indented = re.compile(r"\n\n    (?:\$ |refitd |make |pip |python |docker |kubectl |curl )")
    assert not [name_of(page) for page in PAGES if indented.search(page.read_text())]
    hidden = [str(block) for block in BLOCKS if block.language in {"", "text"} and block.text.startswith("$ ")]
    assert not hidden


@pytest.mark.parametrize("block", of(*SHELL))
def test_the_shell_of_a_page_parses_and_its_commands_are_there(block: Block) -> None:
    lines = list(lines_of(block))
    said = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert said.returncode == 0, f"{block}: {said.stderr}"
    assert not [f"{block}: {fault}" for line in lines for fault in faults(line)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_a_sentence_are_there_as_well(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    inline = [found.replace("\\|", "|") for found in re.findall(r"`((?:refitd|make) [a-z][^`\n]*)`", text)]
    assert not [f"`{line}`: {fault}" for line in inline for fault in faults(line.replace("…", "X"), whole=False)]


@pytest.mark.parametrize("block", of("python"))
def test_the_python_of_a_page_compiles_and_takes_names_that_there_are(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    assert not [f"{module} has no {name}" for module, name in imported(tree) if not has(module, name)]


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What is taken from refitd's own modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("refitd"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    """Whether a module has a name, by its source: what it imports itself (transformers, torch) takes seconds."""
    found = importlib.util.find_spec(module)
    assert found is not None, f"there is no {module}"
    assert found.origin is not None
    return name in set(names(ast.parse(Path(found.origin).read_text())))


def names(tree: ast.Module) -> Iterator[str]:
    """What a module's own lines define or take in."""
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=taken) | ast.Import(names=taken):
                yield from (alias.asname or alias.name for alias in taken)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case _:
                pass
