"""The test's side of `mortal_service`: brings up services that die at a chosen effect, and hears how they end."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mortal_service

PATIENCE = 60.0  # seconds


@dataclass
class Newborn:
    """A service that was brought up. `url` is None when it died before it listened."""

    pid: int
    url: str | None
    log: Path

    @property
    def effects(self) -> list[str]:
        """What it did since it was armed; where it was killed, the last is where it died."""
        return self.log.read_text().splitlines()


class Nursery:
    """One process that forks services, one at a time."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self._births = 0
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Self:
        self._errors = (self._folder / "services.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", mortal_service.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            process_group=0,
        )
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def bring_up(self, *, die_at: int | None = None, die_on: str | None = None, armed: bool = False) -> Newborn:
        """Start a service, and wait until it listens or is dead."""
        self._births += 1
        log = self._folder / f"{self._births:03d}.effects"
        order = {"settings": self._settings, "log": str(log), "die_at": die_at, "die_on": die_on, "armed": armed}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._next("born"))
        while "stands by on" in (said := self._line()):
            pass  # a service of a group, before it leads
        ready = re.search(r'refitd ready on ([^\s"]+)', said)
        url = None if ready is None else ready[1]
        if url is None:
            assert said == f"ended {-signal.SIGKILL}", f"{said}\n{self.tail()}"
        return Newborn(pid, url, log)

    def arm(self, service: Newborn) -> None:
        """Have it count its effects from now on."""
        os.kill(service.pid, signal.SIGUSR1)
        self._next("armed")

    def bury(self) -> None:
        """Wait until the service is dead, and see that it was killed."""
        assert self._next("ended") == str(-signal.SIGKILL), self.tail()

    def stop(self, service: Newborn) -> None:
        """End a service as an operator does."""
        os.kill(service.pid, signal.SIGTERM)
        assert self._next("ended") == "0", self.tail()

    def tail(self) -> str:
        """The end of the services' logs."""
        return "\n".join((self._folder / "services.log").read_text().splitlines()[-30:])

    def _next(self, word: str) -> str:
        said = self._line()
        assert said.startswith(f"{word} "[: len(said)]), f"{said!r} instead of {word!r}\n{self.tail()}"
        return said.removeprefix(word).strip()

    def _line(self) -> str:
        try:
            return self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"the nursery says nothing\n{self.tail()}") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
