"""docs/reference is what the code says of itself: settings, commands, API, SDK."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import refitd_client
from generate import pages
from generate.pictures import pictures
from refitd.cli.app import app
from refitd.cli.serve import variable
from refitd.settings import Settings

PICTURES = pictures()
NAMES = ("settings", "cli", "api", "sdk")
TREE = Path(__file__).parents[2]
REFERENCE = TREE / "docs/reference"


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    """The pages as the code makes them, for those tests alone: it imports all that they describe."""
    return pages()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_the_reference_is_what_the_code_says(name: str, made: dict[Path, str]) -> None:
    path = REFERENCE / f"{name}.md"
    assert path.read_text() == made[path], f"{path.relative_to(TREE)} is stale: run 'make reference' and commit it"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_shows_the_figures_of_the_benchmarks(path: Path) -> None:
    assert path.read_text() == PICTURES[path], f"{path.relative_to(TREE)} is stale: run 'make reference' and commit it"


def test_nobody_wrote_a_page_of_the_reference_by_hand(made: dict[Path, str]) -> None:
    assert sorted(REFERENCE.iterdir()) == sorted(made) == sorted(REFERENCE / f"{name}.md" for name in NAMES)


def commands_of(group: Any, name: str) -> Iterator[str]:
    for child in group.list_commands(None):
        command = group.get_command(None, child)
        yield f"{name} {child}"
        if hasattr(command, "list_commands"):
            yield from commands_of(command, f"{name} {child}")


def test_every_setting_command_route_and_public_name_is_there(made: dict[Path, str]) -> None:
    settings, cli, api, sdk = (made[REFERENCE / f"{name}.md"] for name in NAMES)
    assert all(f"`{variable(name)}` |" in settings for name in Settings.model_fields)
    assert [name for name in commands_of(typer.main.get_command(app), "refitd") if f"# {name}\n" not in cli] == []
    assert [name for name in refitd_client.__all__ if f"### {name}\n" not in sdk and f"`{name}` |" not in sdk] == []
    assert all(f"### {route}\n" in api for route in ("POST /v1/versions", "GET /v1/events", "GET /metrics"))
