"""The `refitd` command itself: without its extras, its help, its errors."""

import os
import re
import subprocess
import sys

import pytest

from refitd.cli.app import COMMANDS
from refitd.cli.output import ExitCode, failure_of
from refitd_client.contract.wire import Problem
from refitd_client.errors import (
    EngineFailedError,
    NoSpaceError,
    RefitError,
    ServiceProblemError,
    ServiceUnreachableError,
    VersionRejectedError,
    WaitTimeoutError,
    problem_error,
)
from support.command_line import refitd

NAMES = list(COMMANDS)


def run_without(package: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process where a package cannot be imported, as where it was not installed."""
    blocked = f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {args!r}"
    code = f"{blocked}; from refitd.__main__ import main; main()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("package", "command"), [("typer", "versions"), ("rich", "status"), ("pydantic_settings", "serve")]
)
def test_the_bare_sdk_says_in_one_line_what_is_missing_and_what_installs_it(package: str, command: str) -> None:
    done = run_without(package, command)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"refitd: the module {package} is missing: pip install '.[service]' in its clone\n"


def test_a_missing_part_of_refitd_is_a_bug_and_not_an_extra() -> None:
    done = run_without("refitd.cli.render", "status")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("words", [["--url", "http://127.0.0.1:1"], ["--limit=3", "--json"]])
def test_status_imports_neither_the_service_nor_what_reads_other_commands_options(words: list[str]) -> None:
    heavy = {"numpy", "pydantic", "typer", "torch", "fastapi", "sqlalchemy"}
    code = f"import atexit, sys; atexit.register(lambda: print(sorted({heavy} & {{*sys.modules}}), file=sys.stderr))"
    code += f"; sys.argv[1:] = {['status', *words]!r}; from refitd.__main__ import main; main()"
    env = {**os.environ, "REFITD_URL": "http://127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "[]")


def test_what_status_cannot_read_is_said_by_the_other_way() -> None:
    for words in (["--limit", "1000"], ["--nonsense"]):
        command = [sys.executable, "-m", "refitd", "status", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "refitd status [OPTIONS]" in done.stderr) == (2, True), words


def test_the_command_line_is_there_without_the_service() -> None:
    code = "import sys, refitd.cli.app; print(sorted({'torch', 'fastapi', 'sqlalchemy', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"pin", "unpin"}])
def test_help_has_examples_on_lines_of_their_own(name: str) -> None:
    assert re.search(rf"^ *refitd {name}\b", refitd(name, "--help").output, re.MULTILINE)


def listed(*words: str) -> set[str]:
    """The commands that a help lists."""
    shown = refitd(*words, env={"COLUMNS": "80"}).output
    return {name for name in NAMES if re.search(rf"^│ {name} ", shown, re.MULTILINE)}


def test_help_shows_the_commands_that_a_user_needs_and_help_all_shows_every_command() -> None:
    assert listed("--help") == listed() == {name for name, line in COMMANDS.items() if line.is_first}
    assert listed("help", "all") == set(NAMES)
    assert refitd("help", "rollback").output == refitd("rollback", "--help").output
    assert refitd("help", "stats").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "slug"),
    [
        (ServiceUnreachableError("no answer"), 3, "service-unreachable"),
        (problem_error(Problem(type="urn:refitd:problem:a", title="t", status=401, detail="d")), 4, "a"),
        (problem_error(Problem(type="urn:refitd:problem:a", title="t", status=403, detail="d")), 4, "a"),
        (problem_error(Problem(type="urn:refitd:problem:a", title="t", status=404, detail="d")), 1, "a"),
        (ServiceProblemError(Problem(type="urn:refitd:problem:a", title="t", status=503, detail="d")), 3, "a"),
        (WaitTimeoutError("late"), 5, "timed-out"),
        (VersionRejectedError("bad"), 1, "version-failed"),
        (EngineFailedError("engines"), 1, "engine-failed"),
        (NoSpaceError("full"), 1, "publish-failed"),
        (RefitError("other"), 1, "failed"),
        (ValueError("what you typed"), 2, "usage"),
        (FileNotFoundError("token"), 1, "io-error"),
    ],
)
def test_each_error_has_one_exit_code_and_one_problem(error: Exception, code: int, slug: str) -> None:
    assert isinstance(error, RefitError | ValueError | OSError)
    failure = failure_of(error)
    assert failure.code is ExitCode(code)
    assert failure.problem.slug == slug
    assert failure.problem.detail
