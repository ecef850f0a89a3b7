"""A process that counts what it does to the world outside, and dies by SIGKILL at one of these effects.

Nothing of it runs on: no `finally`, no last write. Effects have names, which go to a file before anything else.

    commit 3, committed 3                a batch of the journal: before it, and after it when nobody has heard yet
    before POST /pause_generation        a call to an engine: before it,
    sent POST /pause_generation          when it was sent and nobody has waited for the answer,
    heard POST /pause_generation         and after the engine has acted and answered, when nobody has heard
    before plugin prepare, heard plugin prepare     the same of a request to refitd's plugin in the engine
    mkdir trash, rename v000001, fsync   a change of the file system, before it
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from refitd.engine.http import Reply, Transport
from refitd.engine.wire import Exchange, HttpAnswer, Receive
from refitd.state.journal.journal import Journal
from refitd.state.journal.rows import JournalWrite
from refitd_inside.client import channels

SLOW_DISK_SECONDS = 0.05
_UNHEARD: ContextVar[str | None] = ContextVar("unheard", default=None)
_FILE_EFFECTS = frozenset({"os.mkdir", "os.rename", "os.rmdir", "os.remove"})


class Life:
    """Dies at effect number `die_at`, or at the first effect called `die_on`, if it is armed by then."""

    def __init__(self, log: Path, die_at: int | None, die_on: str | None, *, armed: bool) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._die_at = die_at
        self._die_on = die_on
        self._armed = armed
        self._count = 0
        self._commits = 0
        self._turn = threading.Lock()

    def arm(self, *_: object) -> None:
        """Count from now on."""
        self._armed = True

    def effect(self, name: str, *, late: bool = False) -> None:
        """An effect that is about to happen, or has just happened. With `late`, death leaves the others a moment.

        A commit that a slow disk holds up is when somebody who should wait for it shows that he does not.
        """
        with self._turn:
            if not self._armed:
                return
            self._count += 1
            os.write(self._log, f"{name}\n".encode())
            is_end = self._count == self._die_at or name == self._die_on
        if is_end:
            time.sleep(SLOW_DISK_SECONDS if late else 0.0)
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_journal(self) -> None:
        """Count the batches of the journal."""
        commit: Callable[[Journal, list[JournalWrite]], Exception | None] = Journal._commit

        def counted(journal: Journal, batch: list[JournalWrite]) -> Exception | None:
            self._commits += self._armed
            number = self._commits
            self.effect(f"commit {number}", late=True)
            failure = commit(journal, batch)
            self.effect(f"committed {number}")
            return failure

        Journal._commit = counted

    def watch_calls(self) -> None:
        """Count the calls to engines, and to the plugin in them."""
        send = Transport._send

        async def counted(transport: Transport, method: str, path: str, *rest: Any) -> Reply:
            self.effect(f"before {method} {path}")
            _UNHEARD.set(f"sent {method} {path}")
            reply = await send(transport, method, path, *rest)
            self.effect(f"heard {method} {path}")
            return reply

        Transport._send = counted
        ask = channels.ask

        async def counted_ask(folder: int, name: str, access: Any, request: dict[str, Any], within: float) -> Any:
            self.effect(f"before plugin {request['do']}")
            reply = await ask(folder, name, access, request, within)
            self.effect(f"heard plugin {request['do']}")
            return reply

        channels.ask = counted_ask
        answer = Exchange.answer

        async def awaited(talk: Exchange, receive: Receive) -> HttpAnswer:
            name, _ = _UNHEARD.get(), _UNHEARD.set(None)
            if name is not None:  # what waits for the answer has sent all that there was to send
                self.effect(name)
            return await answer(talk, receive)

        Exchange.answer = awaited

    def watch_files(self) -> None:
        """Count changes of the file system: names by the interpreter's audit events, syncs by hand."""

        def audit(event: str, args: tuple[Any, ...]) -> None:
            if event in _FILE_EFFECTS:
                self.effect(f"{event.removeprefix('os.')} {Path(str(args[0])).name}")

        sys.addaudithook(audit)
        sync = os.fsync

        def counted(fd: int) -> None:
            self.effect("fsync")
            sync(fd)

        os.fsync = counted
