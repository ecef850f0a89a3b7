"""Runs `refitd` in this process, as a script would: without a terminal."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import msgspec
from typer.testing import CliRunner, Result

from refitd.cli.app import app
from refitd_client.http import connection

_CLEAN: Mapping[str, str | None] = dict.fromkeys(
    [
        "REFITD_URL",
        "REFITD_TOKEN",
        "REFITD_TOKEN_FILE",
        "REFITD_READ_TOKEN_FILE",
        "REFITD_ROOT",
        "REFITD_RUN",
        "NO_COLOR",
        "FORCE_COLOR",
        "COLUMNS",
    ]
)


def refitd(*args: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Result:
    """Run a command with nothing of refitd's in the environment but `env`."""
    with mock.patch.object(connection, "_own", None):  # which files are in use for TLS is said once for a process
        return CliRunner().invoke(app, list(args), env={**_CLEAN, **(env or {})}, input=stdin)


def answer(*args: str, kind: Any = Any, env: Mapping[str, str] | None = None) -> Any:
    """Run a command with --json, see that it succeeds, and read all of stdout as one document."""
    result = refitd(*args, "--json", env=env)
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=kind)
