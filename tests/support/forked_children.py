"""Children of the demo that are forked from a process which has imported torch and the service.

What an interpreter of its own adds is held by the tests that run the demo as a command.
"""

import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from refitd.__main__ import main as refitd
from refitd_embedded.__main__ import main as refitd_embedded
from refitd_embedded.demo.processes import Child
from support.forked import Forked

_MAINS: dict[str, Callable[[], int | None]] = {"refitd": refitd, "refitd_embedded": refitd_embedded}


class _ForkedChild(Forked):
    """As `subprocess.Popen`, also in what it raises."""

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None


@contextmanager
def forked_children() -> Generator[None]:
    """Each `Child` forks its process meanwhile."""
    with mock.patch.object(Child, "_start", _start):
        yield


def _start(child: Child) -> None:
    _, _, module, *words = child._arguments
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    child._log.write_bytes(b"")
    process = _ForkedChild(partial(_logged, child._log, _MAINS[module]), [module, *words], environment)
    process.stdin.close()
    process.stdout.close()
    child._process = process  # pyright: ignore[reportAttributeAccessIssue]


def _logged(log: Path, main: Callable[[], int | None]) -> int | None:
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    return main()
