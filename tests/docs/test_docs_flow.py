"""The way from a notice to the engine's call, as the page about the architecture lists it, is the way that is taken."""

import ast
import re
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from support import services
from support.checkpoints import publish, tensors
from support.engines import sglang_engine
from support.scripted_sglang import scripted_sglang

TREE = Path(__file__).parents[2]
PAGE = (TREE / "docs/architecture.md").read_text()
SECTION = PAGE.partition("## From a notice to the engine's call\n")[2].partition("\n## ")[0]
STEPS = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)` ", SECTION, re.MULTILINE)
MOST_FILES = 12


def file_of(path: str) -> Path:
    top = "client" if path.startswith("refitd_client/") else "service/refitd"
    return TREE / top / path


def names_in(file: Path) -> set[str]:
    """The functions and methods of a file, as the page names them."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


@pytest.mark.parametrize(("path", "name"), sorted(set(STEPS)))
def test_a_function_on_the_way_is_in_the_file_that_the_page_names(path: str, name: str) -> None:
    assert name in names_in(file_of(path))


def test_each_numbered_line_names_a_function_and_no_more_than_twelve_files_lie_on_the_way() -> None:
    assert len(STEPS) == len(re.findall(r"^\d+\. ", SECTION, re.MULTILINE)) > MOST_FILES
    assert len({path for path, _ in STEPS}) <= MOST_FILES


@contextmanager
def calls_noted(calls: list[tuple[str, str]]) -> Generator[None]:
    """Note the calls of the functions that the page lists, in all threads that begin meanwhile."""
    listed = {(str(file_of(path)), name): (path, name) for path, name in STEPS}
    known: dict[CodeType, tuple[str, str] | None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code not in known:
            known[code] = listed.get((code.co_filename, code.co_qualname))
        if event == "call" and (step := known[code]) is not None:
            calls.append(step)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def test_a_version_that_is_announced_goes_the_way_that_the_page_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls come between: of the scan, and of what the same functions do for another purpose."""
    calls: list[tuple[str, str]] = []
    with scripted_sglang() as sglang, calls_noted(calls):
        monkeypatch.setattr(services, "SimulatedEngine", lambda: sglang_engine(sglang.url))
        async with services.serving(tmp_path, scan_interval=3600.0) as stage:
            await stage.listed()
            publish(stage.root, "run", 1, tensors(1))
            calls.clear()
            reply = await stage.http.post("/v1/versions", json={"run": "run", "step": 1})
            assert reply.status_code == 202
            await stage.until("run~v000001", lambda version: version.served_at is not None)
    assert "/update_weights_from_disk" in sglang.calls
    left = iter(calls)
    assert [step for step in STEPS if step not in left] == []
