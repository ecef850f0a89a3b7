"""The code in docs/publishing.md runs as it stands there."""

import re
from pathlib import Path

import pytest

from support import published
from support.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def _run(_: int, __: int, root: Path, examples: list[str]) -> None:
    names: dict[str, object] = {"root": root}
    for example in examples:
        exec(compile(example, "docs/publishing.md", "exec"), names)  # noqa: S102 our own page


@pytest.mark.filterwarnings("ignore")
def test_every_example_of_the_page_publishes_what_it_says(tmp_path: Path) -> None:
    """Those for several ranks on two, the others on one."""
    collective = [example for example in EXAMPLES if "ShardedPublisher" in example]
    assert run_ranks(2, tmp_path, _run, tmp_path / "two", collective) == [None, None]
    _run(0, 1, tmp_path / "one", [example for example in EXAMPLES if example not in collective])
    runs = [*(tmp_path / "two" / "exp").iterdir(), *(tmp_path / "one" / "exp").iterdir()]
    assert {run.name for run in runs} == {"fsdp2", "parts", "one", "masters"}
    assert all(published.versions(run) == ["v000001"] for run in runs)
    assert published.where(tmp_path / "two" / "exp" / "fsdp2" / "v000001").keys() == {"weight", "bias"}
