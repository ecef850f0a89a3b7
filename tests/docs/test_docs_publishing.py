"""The code in docs/publishing.md runs as it stands there."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from blocks import PAGES, name_of
from torch import distributed

from refitd_client import Publication
from support import published
from support.ranks import run_ranks
from support.sockets import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
ROOT = '"/mnt/weights"'
SAID = re.compile(r"`publication\.([a-z_]+)")


def _run(_: int, __: int, root: Path, examples: list[str]) -> None:
    """Each as a program of its own: it has what it imports and says itself, and nothing else."""
    for example in examples:
        assert ROOT in example
        text = example.replace(ROOT, repr(str(root)))
        exec(compile(text, "docs/publishing.md", "exec"), {})  # noqa: S102 our own page


def _run_as_torchrun(rank: int, size: int, root: Path, examples: list[str], port: int) -> None:
    """In an environment as torchrun makes it, where nobody has made a process group yet."""
    distributed.barrier()  # a group that one rank leaves while another still connects fails there
    distributed.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    _run(rank, size, root, examples)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_says_of_a_publication_is_there_also_when_it_is_staged(page: Path) -> None:
    """In a sentence, where no block runs it."""
    said = {name for line in page.read_text().splitlines() for name in SAID.findall(line)}
    assert said <= {*dir(Publication), *(field.name for field in dataclasses.fields(Publication))}


@pytest.mark.filterwarnings("ignore")
def test_every_example_of_the_page_publishes_what_it_says(tmp_path: Path) -> None:
    """Those for several ranks on two, the others on one."""
    collective = [example for example in EXAMPLES if "ranks=" in example]
    for at, example in enumerate(collective):
        assert run_ranks(2, tmp_path, _run_as_torchrun, tmp_path / "two", [example], free_port()) == [None, None], at
    _run(0, 1, tmp_path / "one", [example for example in EXAMPLES if example not in collective])
    runs = [*(tmp_path / "two" / "exp").iterdir(), *(tmp_path / "one" / "exp").iterdir()]
    assert {run.name for run in runs} == {"fsdp2", "parts", "one", "source", "masters", "fp8"}
    assert all(published.versions(run) == ["v000001"] for run in runs)
    assert published.where(tmp_path / "two" / "exp" / "fsdp2" / "v000001").keys() == {"weight", "bias"}
