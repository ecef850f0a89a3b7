"""An option that needs a value and is typed without one does not take the next option for it."""

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from refitd.cli.app import Command


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["--allow-missing", "--wait"], "[''] True"),
        (["--wait", "--allow-missing"], "[''] True"),
        (["--allow-missing", "mtp.*", "--wait"], "['mtp.*'] True"),
        (["--allow-missing", "a", "--allow-missing=b"], "['a', 'b'] False"),
        ([], "[] False"),
    ],
)
def test_a_permission_without_a_pattern_is_empty(typed: list[str], found: str) -> None:
    app = typer.Typer()

    @app.command(cls=Command)
    def _publish(
        allow_missing: Annotated[list[str], typer.Option("--allow-missing")] = [],  # noqa: B006
        wait: Annotated[bool, typer.Option("--wait")] = False,
    ) -> None:
        typer.echo(f"{allow_missing} {wait}")

    assert CliRunner().invoke(app, typed).stdout.strip() == found
