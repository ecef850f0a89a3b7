"""Notices threads while a load is watched: the dispatcher shows only what its own thread does."""

import threading
from collections.abc import Callable
from typing import Any

_ONE_AT_A_TIME = threading.Lock()  # functions of the standard library are exchanged meanwhile


class Threads:
    """Calls `tell` when the thread that began it starts another one, or gives work to one."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._undo: list[Any] = []

    def begin(self) -> None:
        """From here on."""
        from concurrent.futures import ThreadPoolExecutor

        _ONE_AT_A_TIME.acquire()
        self._watch(threading.Thread, "start")
        self._watch(ThreadPoolExecutor, "submit")

    def end(self) -> None:
        """Until here."""
        while self._undo:
            self._undo.pop()()
        _ONE_AT_A_TIME.release()

    def _watch(self, kind: type, name: str) -> None:
        original, tell, mine = getattr(kind, name), self._tell, threading.get_ident()

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                tell()
            return original(*args, **kwargs)

        setattr(kind, name, watched)
        self._undo.append(lambda: setattr(kind, name, original))
