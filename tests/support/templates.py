"""What runs in a process that has imported an engine, and from which servers are forked (tests/*/template).

The engine's interpreter imports this module by its path: it needs the standard library alone.

Standard input is a socket of whole messages. Each is an order for a server, {"words": […], "environment": {…}} in JSON,
with the descriptor that it prints to and a pipe that gets its pid and, when it ends, its exit status. When the socket
for orders is closed, all servers are killed.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LONGEST = 1 << 20  # bytes of a message


def forget_tests() -> None:
    """Take the tests' folder from the path of modules: folders in it have the names of engines."""
    sys.path.remove(os.environ.pop("PYTHONPATH"))


def take_orders(serve: Callable[[list[str]], None]) -> None:
    """Start servers, and say of each when it has ended.

    Args:
        serve: what a new process does with the words of its order. Its environment and its output are its own then.
    """
    kept = opened()  # by the engine's modules
    gc.collect()
    gc.freeze()  # a collection would copy the memory that all processes share
    orders = socket.socket(fileno=os.dup(0))
    wakes, signals = os.pipe()
    os.set_blocking(signals, False)
    signal.set_wakeup_fd(signals)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, Connection] = {}
    while True:
        ready, _, _ = select.select([orders, wakes], [], [])
        if wakes in ready:
            os.read(wakes, LONGEST)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    _tell(running.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))
        if orders in ready:
            order, given, *_ = socket.recv_fds(orders, LONGEST, 2)
            if not order:
                break
            output, listener = given
            pid = _forked(serve, json.loads(order), output, kept)
            os.close(output)
            running[pid] = Connection(listener, readable=False)
            _tell(running[pid], pid)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def ending(do: Callable[[], object]) -> int:
    """Do what a process of its own does; the exit status that an interpreter would have then."""
    status = 1
    try:
        do()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return status


def opened() -> set[int]:
    """The descriptors of this process, without the one that it looks with."""
    return {int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").is_symlink()}


def close_others(kept: set[int]) -> None:
    """Close all descriptors but these and the first three."""
    for descriptor in opened() - kept - {0, 1, 2}:
        os.close(descriptor)


def be_in(environment: dict[str, str]) -> None:
    """Have these variables and no others."""
    os.environ.clear()
    os.environ.update(environment)


def _forked(serve: Callable[[list[str]], None], order: dict[str, Any], output: int, kept: set[int]) -> int:
    """The process of a new server."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        _be_apart(order["environment"], output, kept)
        status = ending(lambda: serve(order["words"]))
    finally:
        os._exit(status)


def _be_apart(environment: dict[str, str], output: int, kept: set[int]) -> None:
    """Become the leader of a process group, with nothing of the template's but its modules."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    close_others(kept)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    be_in(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def _tell(listener: Connection, number: int) -> None:
    """Send a number, unless nothing listens any more."""
    with suppress(BrokenPipeError):
        listener.send(number)
