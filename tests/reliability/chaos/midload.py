"""Brings a real SGLang into the middle of a load, and holds it there.

A load of these models takes 5 ms, too little to hit by chance. So its scheduler, the process that holds the weights, is
stopped (SIGSTOP) before an update is sent, and then let run in slices of half a millisecond until its own log says that
the load has begun, and a few slices more. The log also tells whether it has not ended by then.
"""

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.servers import SglangServer

SLICE = 0.0005  # seconds
REST = 0.003  # seconds for the log to arrive
SENT = re.compile(rb"Start update_weights")
BEGUN = re.compile(rb"Update engine weights online from disk begin")
ENDED = re.compile(rb"Update weights end")
ARRIVES_WITHIN = 20.0
BEGINS_WITHIN = 10.0


@dataclass(slots=True)
class LogTail:
    """What a log has grown by."""

    path: Path
    _position: int = 0
    _text: bytes = b""

    def forget(self) -> None:
        """Look at nothing that is there now."""
        self._position, self._text = self.path.stat().st_size, b""

    def has(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether a line has come since then."""
        with self.path.open("rb") as log:
            log.seek(self._position)
            new = log.read()
        self._position += len(new)
        self._text += new
        return pattern.search(self._text) is not None


@dataclass(slots=True)
class MidLoad:
    """One SGLang that can be stopped in mid-load."""

    server: SglangServer
    _tail: LogTail = field(init=False)
    _scheduler: int = 0
    _leader: int = 0

    def __post_init__(self) -> None:
        self._tail = LogTail(self.server.log)

    def freeze(self) -> None:
        """Stop the scheduler: what is sent from now on waits."""
        if self._leader != self.server.pid:
            self._leader, self._scheduler = self.server.pid, self.server.scheduler.pid
        self._tail.forget()
        self._signal(signal.SIGSTOP)

    def step_into_load(self, slices: int) -> bool:
        """Let it run into a load that is sent now, and `slices` further; whether it is stopped in the middle of it."""
        if not self._comes(SENT, ARRIVES_WITHIN):
            return False
        ends = time.monotonic() + BEGINS_WITHIN
        while not self._tail.has(BEGUN):
            if time.monotonic() > ends:
                return False
            self._slice()
        for _ in range(slices):
            self._slice()
        time.sleep(REST)
        return not self._tail.has(ENDED)

    def thaw(self) -> None:
        """Let it go on, if it still lives."""
        self._signal(signal.SIGCONT)

    def _comes(self, pattern: re.Pattern[bytes], within: float) -> bool:
        ends = time.monotonic() + within
        while not self._tail.has(pattern):
            if time.monotonic() > ends:
                return False
            time.sleep(0.001)
        return True

    def _slice(self) -> None:
        self._signal(signal.SIGCONT)
        time.sleep(SLICE)
        self._signal(signal.SIGSTOP)
        time.sleep(REST)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._scheduler, number)
