"""A `refitd serve` as a child process: started, waited for, started again when it dies, and never left behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import httpx

from refitd_client.backoff import backoff
from refitd_client.errors import FollowerStartError

_READY = re.compile(r"refitd ready on (https?://\S+?:(\d+))(?=$|[\s\"'])")
_TAIL = 20  # lines of its output that an error shows
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before it is started again, twice as long each time
_STEADY = 60.0  # seconds after which a process that ends counts as the first one again
_READY_LOOK_SECONDS = 0.1  # seconds between two questions whether it is ready
_DRAIN = 60.0  # seconds for updates that are under way

# The kernel ends it with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), also when this process is killed,
# which may have happened by then: the first word is its number. Asked for by the child itself, because a function
# between fork and exec is not safe in a process of several threads.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class FollowerProcess:
    """Keeps one process running from now on, until `stop`. What it prints goes to this process's output."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """Start it.

        Args:
            command: its command line without its port.
            port: the port to listen on; 0 lets it choose one, which it keeps when it is started again.
        """
        self._command = tuple(command)
        self._port = port
        self._url = ""
        self._changed = threading.Condition()
        self._stopping = False
        self._failed = ""  # how it ended before it was ready for the first time
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL)
        # The thread that starts it lives as long as it does: the kernel ends the process with the thread.
        self._keeper = threading.Thread(target=self._keep, name="refitd-follower", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int | None:
        """The number of the process, None where none runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def wait_ready(self, timeout: float) -> str:
        """Wait until it is ready, and return its URL.

        Raises:
            FollowerStartError: it has ended, or is not ready after `timeout` seconds. The message has what it printed.
        """
        ends = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._url or self._failed, timeout)
        while not self._failed and time.monotonic() < ends:
            if self._url and _is_ready(self._url):
                return self._url
            time.sleep(_READY_LOOK_SECONDS)
        told = self._failed or f"it is not ready after {timeout:g} s"
        raise FollowerStartError(f"refitd serve: {told}. It has printed:\n" + "\n".join(self._tail))

    def stop(self) -> None:
        """End it, and start it no more. Updates that are under way come to their end first."""
        with self._changed:
            self._stopping = True
            process = self._process
            self._changed.notify_all()
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_DRAIN)
            except subprocess.TimeoutExpired:
                process.kill()
        self._keeper.join(_DRAIN)

    def _keep(self) -> None:
        tried = 0
        while (process := self._begun()) is not None:
            began = time.monotonic()
            self._read(process)
            status = process.wait()
            tried = 1 if time.monotonic() - began > _STEADY else tried + 1
            pause = backoff(tried, _FIRST_PAUSE, _LONGEST_PAUSE)
            with self._changed:
                if not self._stopping:
                    self._say_ended(status, pause)
                self._changed.wait_for(lambda: self._stopping, pause)

    def _begun(self) -> "subprocess.Popen[str] | None":
        with self._changed:
            if self._stopping:
                return None
            words = (sys.executable, "-c", _PRELUDE, str(os.getpid()), *self._command, "--port", str(self._port))
            self._process = subprocess.Popen(  # noqa: S603 - refitd itself, with the caller's settings
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            return self._process

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Pass on what it prints until it ends, and note where it listens."""
        with process.stdout or nullcontext(()) as lines:
            for line in lines:
                print(line, end="", flush=True)
                self._tail.append(line.rstrip())
                if (found := _READY.search(line.rstrip())) is not None:
                    with self._changed:
                        self._url, self._port = found[1], int(found[2])
                        self._changed.notify_all()

    def _say_ended(self, status: int, pause: float) -> None:
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        if not self._url:
            self._failed = f"it has ended with {how}"
            self._changed.notify_all()
        print(f"refitd serve has ended with {how}: it is started again in {pause:g} s", flush=True)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False
