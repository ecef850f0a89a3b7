"""What the product's own source must not contain: whatever runs code that a file brings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = sorted((REPOSITORY / "service").rglob("*.py")) + sorted((REPOSITORY / "client").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
CALLS |= {"pandas.read_pickle", "os.system", "os.popen", "compile"}
# Ranks of one job say to each other what they found, as torch's own collectives for objects do: no file is read.
BETWEEN_RANKS = {"client/refitd_client/sharded/rank_group.py"}
FLAGS = {"allow_pickle", "shell", "trust_remote_code"}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Imports and calls that can run what they read. `torch.load` passes where it says that it cannot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {each.name}" for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in CALLS and not _is_safe(name, node):
            yield f"{name}(…) in line {node.lineno}"
        elif isinstance(node, ast.keyword) and node.arg in FLAGS and ast.unparse(node.value) != "False":
            yield f"{node.arg}= in line {node.value.lineno}"


def _is_safe(name: str, call: ast.Call) -> bool:
    said = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return name == "torch.load" and said.get("weights_only") == "True"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_source_runs_what_a_file_brings(path: Path) -> None:
    known = ["import pickle"] if str(path.relative_to(REPOSITORY)) in BETWEEN_RANKS else []
    assert list(dangers(ast.parse(path.read_text()))) == known


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_look_finds_what_it_looks_for(source: str) -> None:
    assert list(dangers(ast.parse(source)))
