"""What a command prints: tables for people, or one JSON document on stdout for machines. Imports no Typer.

With `--json`, stdout holds one document and nothing else: the answer, or a problem (RFC 9457). Progress and remarks go
to stderr. Colours follow the terminal and NO_COLOR (https://no-color.org).
Long work shows its progress on a terminal.
"""

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Column
from rich.text import Text

from refitd.text import clean
from refitd_client.contract.wire import Problem
from refitd_client.errors import (
    EngineFailedError,
    PlanRefusedError,
    PublishError,
    RefitError,
    ServiceProblemError,
    ServiceUnreachableError,
    UnauthorizedError,
    VersionFailedError,
    WaitTimeoutError,
)
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy


class ExitCode(IntEnum):
    """The exit codes of every command. 130 is an interrupt (Ctrl-C), as in every shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNAUTHORISED = 4
    TIMED_OUT = 5


_HINTS: Mapping[ExitCode, str] = {
    ExitCode.UNREACHABLE: "Is it running ('refitd serve'), and is this its address? Say --url, or set REFITD_URL.",
    ExitCode.UNAUTHORISED: "Say --token-file, or set REFITD_TOKEN or REFITD_TOKEN_FILE.",
}


_MAY_ONLY_LOOK = (
    "The token that was sent may only look: say the --token-file, or set the REFITD_TOKEN, of the other one."
)
# The notice named a path beneath the root: the service has another root, or does not see the files yet.
_LOOKED_ELSEWHERE = frozenset({"path-missing", "path-outside-root"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    code: ExitCode
    problem: Problem

    @property
    def hint(self) -> str | None:
        return _MAY_ONLY_LOOK if self.problem.slug == "insufficient-scope" else _HINTS.get(self.code)


# The exit code, and the problem's slug, title and status, of each kind of error; the first that fits.
_EXITS: tuple[tuple[type[Exception], ExitCode, str, str, int], ...] = (
    (ServiceUnreachableError, ExitCode.UNREACHABLE, "service-unreachable", "The service cannot be reached", 503),
    (WaitTimeoutError, ExitCode.TIMED_OUT, "timed-out", "The time is up", 504),
    (VersionFailedError, ExitCode.FAILED, "version-failed", "The version will not be served", 409),
    (EngineFailedError, ExitCode.FAILED, "engine-failed", "Engines did not take the version", 502),
    (PublishError, ExitCode.FAILED, "publish-failed", "Nothing was published", 422),
    (RefitError, ExitCode.FAILED, "failed", "The command failed", 500),
    (OSError, ExitCode.FAILED, "io-error", "A file cannot be used", 500),
)


def failure_of(error: RefitError | ValueError | OSError) -> Failure:
    """Return the exit code and the problem of an error. A ValueError is about what the user typed."""
    if isinstance(error, ServiceProblemError):
        code = ExitCode.UNREACHABLE if error.problem.status == 503 else ExitCode.FAILED
        if isinstance(error, UnauthorizedError):
            code = ExitCode.UNAUTHORISED
        return Failure(code=code, problem=_with_what_stands(error))
    if not isinstance(error, PlanRefusedError):
        for kind, code, slug, title, status in _EXITS:
            if isinstance(error, kind):
                return Failure(code=code, problem=_problem(slug, title, status, str(error)))
    return usage(str(error))


def usage(sentence: str) -> Failure:
    return Failure(code=ExitCode.USAGE, problem=_problem("usage", "This is not how the command is used", 400, sentence))


def _with_what_stands(error: ServiceProblemError) -> Problem:
    """The problem; of a version that was published all the same, also its path and whether the service will find it."""
    if (publication := error.publication) is None:
        return error.problem
    stands = f"{publication.version_id} is on disk at {publication.path} all the same"
    if error.problem.slug in _LOOKED_ELSEWHERE:
        finds = "where that is another folder the service never finds it: publish with the --root of 'refitd serve'"
    elif error.problem.slug == "run-followed":
        finds = "the service that watches that root brings no engine to it if it follows an upstream: delete it then"
    else:
        finds = "a service that watches that root finds it by itself"
    return replace(error.problem, detail=f"{error.problem.detail}; {stands}: {finds}")


def _problem(slug: str, title: str, status: int, detail: str) -> Problem:
    return Problem(type=f"urn:refitd:problem:{slug}", title=title, status=status, detail=detail)


# Lines are not cut in a pipe: a table that is cut at 80 columns cannot be searched.
_PIPE_WIDTH = 1000


class Output:
    """The two streams of a command."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.console = _console(stderr=False)
        self.err = _console(stderr=True)

    @property
    def shows_progress(self) -> bool:
        """Whether stderr is a terminal, and the answer is not to be JSON."""
        return self.err.is_terminal and not self.json

    @property
    def window(self) -> int | None:
        """The columns of the window; None into a pipe, where lines are as long as what they say."""
        return None if self.console.width == _PIPE_WIDTH else self.console.width

    def show(self, document: Any, *shown: RenderableType) -> None:
        """Print the answer: `document` for machines, or what is `shown` to people."""
        if self.json:
            text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            return
        for part in shown:
            self.console.print(part)

    def remark(self, sentence: str, style: str = "yellow") -> None:
        """Print a sentence on stderr, beside the answer."""
        self.err.print(Text(clean(sentence), style=style))

    def fail(self, failure: Failure) -> None:
        if self.json:
            self.show(failure.problem)
        else:
            self.remark(failure.problem.detail, style="bold red")
            if failure.hint is not None:
                self.remark(failure.hint, style="dim")


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


@contextmanager
def speaking(*, json: bool) -> Generator[Output]:
    """The output of one command. An expected error ends it with a sentence and an exit code, without a traceback."""
    out = Output(json=json)
    try:
        yield out
    except BrokenPipeError:
        raise  # the reader of stdout has gone: no message would reach it
    except (RefitError, ValueError, OSError) as error:
        failure = failure_of(error)
        out.fail(failure)
        raise SystemExit(failure.code) from error


@contextmanager
def bar(out: Output, text: str) -> Generator[Callable[[int, int], None] | None]:
    """Show a bar on stderr for the length of the block, and clear it; None where stderr is no terminal.

    Yields a function that gets how many bytes of how many are done, in any thread.
    """
    if not out.shows_progress:
        yield None
        return
    # Here, because few commands need it, and it takes a while to import.
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True), markup=False)
    columns = (SpinnerColumn(), words, BarColumn(20), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out.err, transient=True) as progress:
        task = progress.add_task(clean(text), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# At a prompt, a service that does not answer is reported soon.
PROMPT = RetryPolicy(deadline=2.0)


def connect(url: str | None, token_file: Path | None, retry: RetryPolicy = PROMPT) -> RefitClient:
    """The client that the options ask for.

    Raises:
        ValueError: the URL or the token cannot be one.
    """
    return RefitClient(url, token_file=token_file, retry=retry)
