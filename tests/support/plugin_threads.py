"""Threads of the plugin, which last as long as an engine's process, and here as long as the test that has the engine.

Those that would be left look at something again and again, or listen in turns of 20 µs, for which every other thread of
the process gives up the interpreter: tests after them would take half as long again, and at times not end.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

from support.sockets import reach

_SECONDS = 1.0  # a channel whose root has no folder for it looks for one every other second
_never = threading.Lock()
_never.acquire()


@contextmanager
def ending_plugin_threads() -> Generator[None]:
    """End those that were begun meanwhile, or have them do no more."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name == "refitd-follow":
            _stop_following(thread)
            continue
        owner: Any = getattr(getattr(thread, "_target", None), "__self__", None)  # None where it has just ended
        if owner is None:
            continue
        match thread.name:
            case "refitd-channel":
                _close(owner)
                thread.join(_SECONDS)
            case "refitd-following":
                owner.fall_back_on_files = lambda: True  # there is nothing to wait for any more
            case "refitd-ipc-watch":
                owner._turn = _never
            case "refitd-deadline":
                owner._stop_seconds = owner._slow_seconds = 3600.0
            case _:
                pass


def _stop_following(thread: Any) -> None:
    """A user has 128 instances of inotify on most machines, and each of these threads has one."""
    target = getattr(thread, "_target", None)
    if target is None:
        return
    (renames,), has_left = target.args, threading.Event()

    def wait() -> Any:
        has_left.set()
        _never.acquire()

    renames.wait = wait
    with renames._turn:
        renames._forget()  # an event: the thread looks once more
    if has_left.wait(_SECONDS):
        os.close(renames._fd)


def _close(channel: Any) -> None:
    channel._listen = channel._accept = _ended
    with suppress(OSError), socket(AF_UNIX, SOCK_STREAM) as line:  # it does not listen, or its root is gone
        line.settimeout(_SECONDS)
        reach(line, channel.root / ".refitd" / "engines" / channel.name)


def _ended(*_: Any) -> None:
    raise ConnectionError("its test has ended")
