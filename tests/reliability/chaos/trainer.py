"""The publisher's process as the harness sees it: told what to publish, heard, killed, started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "publisher.py"
START_SECONDS = 60.0

Line = dict[str, Any]


class TrainerError(Exception):
    """The publisher ended by itself or is silent; the text has the end of what it wrote."""


class Trainer:
    """One publisher at a time, with all lines that it and its predecessors have said."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self.lines: list[Line] = []
        self._arguments = arguments
        self._first = 0  # line of the publisher that runs now
        self._process: subprocess.Popen[str] | None = None
        self._said = threading.Condition()

    def start(self) -> None:
        """Start a publisher and wait until it holds the run."""
        mark = self._first = len(self.lines)
        with self.log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        self.until("ready", mark, START_SECONDS)

    def publish(self, step: int, path: Path, model: str) -> int:
        """Have a step published; return where its lines begin."""
        mark = len(self.lines)
        pipe = self._running.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps({"step": step, "path": str(path), "model": model}) + "\n")
            pipe.flush()
        except OSError as error:
            raise TrainerError(f"the publisher has ended; the end of {self.log}:\n{self.tail()}") from error
        return mark

    def until(self, at: str, mark: int, within: float) -> Line:
        """Wait for a line after `mark`.

        Raises:
            TrainerError: it does not come.
        """
        with self._said:
            self._said.wait_for(lambda: self.said(at, mark) or self.said("end", mark), within)
        line = self.said(at, mark)
        if line is None:
            raise TrainerError(f"the publisher did not say {at!r}; the end of {self.log}:\n{self.tail()}")
        return line

    def said(self, at: str, mark: int) -> Line | None:
        """A line after `mark`, None if there is none (yet)."""
        return next((line for line in self.lines[mark:] if line["at"] == at), None)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone and all that it said is here."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._await_end()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        self._process = None

    def outcomes(self) -> list[str]:
        """How waits for versions ended."""
        return [line["outcome"] for line in self.lines if line["at"] == "waited"]

    def tail(self) -> str:
        """The end of what it wrote to standard error."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    @property
    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None:
            raise TrainerError("the publisher is not running")
        return self._process

    def _await_end(self) -> None:
        """Its last words are here when its output has ended."""
        with self._said:
            self._said.wait_for(lambda: self.said("end", self._first), START_SECONDS)

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._hear(json.loads(line) if line.endswith("}\n") else {"at": "cut off"})
        self._hear({"at": "end"})

    def _hear(self, line: Line) -> None:
        with self._said:
            self.lines.append(line | {"heard": time.monotonic()})
            self._said.notify_all()
