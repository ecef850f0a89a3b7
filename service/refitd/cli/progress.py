"""How far something is that takes its time, where somebody watches; nothing at all where nobody does."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.table import Column

from refitd.cli.output import Output
from refitd.text import clean
from refitd_client.errors import RefitError

LOOK_SECONDS = 0.5
AnswerT = TypeVar("AnswerT")


class Bar:
    """What is done, and bytes of how many: a bar as soon as it is known how many there are. For any thread."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress = progress
        self._task = progress.add_task(clean(text), total=None)
        self._total = 0
        self._turn = threading.Lock()

    def say(self, text: str) -> None:
        """What is being done from now on."""
        self._progress.update(self._task, description=clean(text))

    def expect(self, count: int) -> None:
        """So many bytes more are to come."""
        with self._turn:
            self._total += count
        self._progress.update(self._task, total=self._total)

    def read(self, count: int) -> None:
        """So many bytes more are done."""
        self._progress.advance(self._task, count)

    def reach(self, done: int, total: int) -> None:
        """So many bytes are done, of so many."""
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def bar(out: Output, text: str) -> Generator[Bar | None]:
    """A bar on stderr for the length of the block, which leaves no trace; None where nobody watches."""
    if not out.shows_progress:
        yield None
        return
    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True), markup=False)
    columns = (SpinnerColumn(), words, BarColumn(20), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out.err, transient=True) as progress:
        yield Bar(progress, text)


def watched(work: Callable[[], AnswerT], look: Callable[[], None]) -> AnswerT:
    """Do `work` in a thread, and `look` from time to time; a look that fails says nothing of the work.

    Ctrl-C ends the wait and not the work: nothing here must be stopped in the middle.
    """
    future: Future[AnswerT] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not wait([future], timeout=LOOK_SECONDS).done:
        with suppress(RefitError):
            look()
    return future.result()
