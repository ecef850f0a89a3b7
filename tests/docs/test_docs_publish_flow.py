"""The way from publish() to the rename, as docs/architecture.md lists it, is the way that a publication takes."""

import ast
import re
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from refitd_client import PublishOptions, WeightPublisher
from support.durable_effects import make_base, make_slot, weights

CLIENT = Path(__file__).parents[2] / "client/refitd_client"
PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
SECTION = PAGE.partition("## From publish() to the rename\n")[2].partition("\n## ")[0]
STEPS = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)` \w", SECTION, re.MULTILINE)
LINES = re.findall(r"^\d+\. ", SECTION, re.MULTILINE)
ASIDE = ("http/", "publish/tracing.py", "contract/decoding.py")  # the edge, telemetry, a library's call with a lock


def functions_of(file: str) -> set[str]:
    found: set[str] = set()
    for node in ast.parse((CLIENT / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def calls_of_a_publication(root: Path) -> set[tuple[str, str]]:
    """The functions of the SDK that publishing two full versions calls, each with its file.

    Small ones, so that one thread does it all; of torch's tensors and of numpy's; into a new folder and into a slot.
    """
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(CLIENT):
            called.add((file.relative_to(CLIENT).as_posix(), frame.f_code.co_qualname))

    base = make_base(root.parent / "base")
    make_slot(root)
    with WeightPublisher(root, "run", options=PublishOptions(base_model=base, max_shard_bytes=256)) as publisher:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            publisher.publish(weights(1), step=1)
            publisher.publish({"w": torch.arange(4.0), "b": np.ones(3, np.float32)}, step=2)
        finally:
            sys.setprofile(before)
    return called


def test_each_line_names_one_function_that_is_there() -> None:
    assert len(STEPS) == len(LINES) > 0
    assert [step for step in STEPS if step[1] not in functions_of(step[0])] == []


def test_the_way_leads_through_at_most_15_files() -> None:
    assert len({file for file, _ in STEPS}) <= 15


def test_a_publication_goes_this_way_and_through_no_other_files(tmp_path: Path) -> None:
    called = calls_of_a_publication(tmp_path / "root")
    files = {file for file, _ in called if not file.startswith(ASIDE)}
    assert files == {file for file, _ in STEPS}
    names = called | {(file, name.removesuffix(".__init__")) for file, name in called}
    assert [step for step in STEPS if step not in names] == []
