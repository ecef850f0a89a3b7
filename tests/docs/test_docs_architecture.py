"""The page about the architecture names files that are there, and the names that it says they have."""

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
PAGE = (TREE / "docs/architecture.md").read_text()
TOPS = [TREE / top for top in ("service/refitd", "client/refitd_client", "service", "client", ".")]
PATHS = sorted(set(re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`", PAGE)))


def files_of(path: str) -> list[Path]:
    return [top / path for top in TOPS if (top / path).exists()]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_of_the_page_is_there(path: str) -> None:
    assert files_of(path)


@pytest.mark.parametrize(("path", "name"), sorted(set(re.findall(r"`((?:\w+/)*\w+\.py)` \(`(\w+)`\)", PAGE))))
def test_a_file_of_the_page_has_the_name_that_stands_beside_it(path: str, name: str) -> None:
    pattern = rf"^(?:async def|def|class) {name}\b"
    assert any(re.search(pattern, file.read_text(), re.MULTILINE) for file in files_of(path))
