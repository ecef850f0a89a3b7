"""What a command says: to people as tables, to machines as one JSON document on stdout.

With `--json`, stdout holds one document and nothing else: the answer, or a problem (RFC 9457). Progress and remarks go
to stderr. Colours follow the terminal and NO_COLOR (https://no-color.org).
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from refitd.cli.exits import Failure, failure_of
from refitd.text import clean
from refitd_client.errors import RefitError

# Into a pipe, lines are as long as they are: a table that is cut at 80 columns cannot be searched.
_PIPE_WIDTH = 1000
PAGE_WIDTH = 100  # columns of tables that are to be read from beginning to end, also into a pipe


class Output:
    """The two streams of a command."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.console = _console(stderr=False)
        self.err = _console(stderr=True)

    @property
    def shows_progress(self) -> bool:
        """Whether somebody watches stderr."""
        return self.err.is_terminal and not self.json

    def show(self, document: Any, *shown: RenderableType, width: int | None = None) -> None:
        """Give the answer.

        Args:
            document: for machines.
            shown: for people.
            width: columns that tables may take into a pipe; by default as many as their rows have. Sentences go on to
                their end in any case.
        """
        if self.json:
            text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            return
        narrower = None if width is None else min(width, self.console.width)
        for part in shown:
            is_free = self.console.is_terminal or not isinstance(part, RichTable)
            self.console.print(part, width=None if is_free else narrower)

    def remark(self, sentence: str, style: str = "yellow") -> None:
        """Say something beside the answer."""
        self.err.print(Text(clean(sentence), style=style))

    def fail(self, failure: Failure) -> None:
        """Say why there is no answer."""
        if self.json:
            self.show(failure.problem)
        else:
            self.remark(failure.problem.detail, style="bold red")
            if failure.hint is not None:
                self.remark(failure.hint, style="dim")


@contextmanager
def speaking(*, json: bool) -> Generator[Output]:
    """The output of one command. Errors that are expected end it with their sentence and exit code, not a traceback."""
    out = Output(json=json)
    try:
        yield out
    except BrokenPipeError:
        raise  # whoever read stdout has gone: there is nobody to tell
    except (RefitError, ValueError, OSError) as error:
        failure = failure_of(error)
        out.fail(failure)
        raise typer.Exit(failure.code) from error


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
