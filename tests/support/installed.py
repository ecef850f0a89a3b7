"""refitd in another environment than the tests': its service, its commands, and programs there."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .servers import ADMIN_KEY, API_KEY, RefitdProgram


class InstalledServer(RefitdProgram):
    """`refitd serve` there. `python` is the environment's, `variables` are added to its environment's."""

    def __init__(
        self, python: str, variables: dict[str, str], folder: Path, root: Path, engines: Sequence[str], *flags: str
    ) -> None:
        folder.mkdir()
        root.mkdir()
        keys: list[str] = []
        for flag, key in (("--engine-key-file", API_KEY), ("--engine-admin-key-file", ADMIN_KEY)):
            (folder / flag).write_text(key)
            keys += [flag, str(folder / flag)]
        super().__init__(folder, root, engines, *keys, "--insecure", *flags)
        self._python, self._variables = python, variables

    def command(self, port: int) -> Sequence[str]:
        return [self._python, *super().command(port)[1:]]

    def environment(self) -> dict[str, str]:
        return super().environment() | self._variables

    def refitd(self, *words: str, fails: bool = False) -> str:
        """Run a command of it; what it prints, with its errors."""
        variables = self._variables | {"REFITD_URL": self.url}
        return ran(self._python, "-m", "refitd", *words, variables=variables, fails=fails)


def ran(python: str, *words: str, variables: dict[str, str] | None = None, fails: bool = False, **more: Any) -> str:
    """Run a program there, and return what it prints. It succeeds, or `fails`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (variables or {})
    done = subprocess.run(
        [python, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        **more,
    )
    assert (done.returncode != 0) is fails, done.stdout
    return done.stdout
