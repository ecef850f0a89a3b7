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
from refitd.cli.flags import variable
from refitd.settings import Settings

PAGES = pages()
PICTURES = pictures()
NAMES = ("settings", "cli", "api", "sdk")
TREE = Path(__file__).parents[2]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_of_the_reference_is_what_the_code_says(path: Path) -> None:
    assert path.read_text() == PAGES[path], f"{path.relative_to(TREE)} is stale: run 'make reference' and commit it"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_shows_the_figures_of_the_benchmarks(path: Path) -> None:
    assert path.read_text() == PICTURES[path], f"{path.relative_to(TREE)} is stale: run 'make reference' and commit it"


def test_nobody_wrote_a_page_of_the_reference_by_hand() -> None:
    assert sorted((TREE / "docs/reference").iterdir()) == sorted(PAGES)


def commands_of(group: Any, name: str) -> Iterator[str]:
    for child, command in group.commands.items():
        yield f"{name} {child}"
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{name} {child}")


def test_every_setting_command_route_and_public_name_is_there() -> None:
    settings, cli, api, sdk = (
        next(text for path, text in PAGES.items() if path.name == f"{name}.md") for name in NAMES
    )
    assert all(f"`{variable(name)}` |" in settings for name in Settings.model_fields)
    assert [name for name in commands_of(typer.main.get_command(app), "refitd") if f"# {name}\n" not in cli] == []
    assert [name for name in refitd_client.__all__ if f"### {name}\n" not in sdk and f"`{name}` |" not in sdk] == []
    assert all(f"### {route}\n" in api for route in ("POST /v1/versions", "GET /v1/events", "GET /metrics"))
