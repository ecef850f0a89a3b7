"""What can be seen of an engine that runs on this host: its process, by the port it listens on.

The process that listens may be the end of a tunnel (ssh, kubectl, docker-proxy, refitd's own facade), which sees other
files. So a process counts as the engine only where it was started as one.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

import httpx
import psutil

from refitd.engine.registry import KINDS
from refitd_client.files.plain_file import read_plain

PROC = Path("/proc")
_ENGINE_PROGRAMS = re.compile("|".join(kind.programs for kind in KINDS))
_PROCESS_FILE_BYTES = 2**20  # of a file
_TAKES_A_WORD = frozenset({"-X", "-W"})  # options of Python


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcess:
    """An engine's process. `environment` is None where this user may not read it."""

    pid: int
    environment: Mapping[str, str] | None

    def reads(self, path: str) -> str | None:
        """Read a small file as the process sees it; None where there is none, or this user may not read it."""
        with suppress(OSError, UnicodeDecodeError):
            return read_plain(PROC / str(self.pid) / "root" / path.lstrip("/"), _PROCESS_FILE_BYTES).decode()
        return None

    @property
    def can_be_seen(self) -> bool:
        """Whether this user may look at files as the process sees them."""
        with suppress(OSError):
            return (PROC / str(self.pid) / "root" / "proc").exists()
        return False


class Listeners:
    """The processes that listen on this host, by their ports: looked up once, when they are first asked for."""

    def __init__(self) -> None:
        self._pids: dict[int, int] | None = None

    def at(self, url: str) -> int | None:
        """The process on this host that listens at a URL's port; None where none can be seen."""
        to = httpx.URL(url)
        port = to.port or (443 if to.scheme == "https" else 80)
        if not _is_here(to.host, port):
            return None
        if self._pids is None:
            self._pids = _listening()
        return self._pids.get(port)

    def engine_at(self, url: str) -> LocalProcess | None:
        """The engine's process that answers at a URL; None where that is elsewhere, or another program answers."""
        pid = self.at(url)
        with suppress(psutil.Error):
            if pid is not None and any(is_engine(command_of(one)) for one in (pid, psutil.Process(pid).ppid())):
                return LocalProcess(pid=pid, environment=environment_of(pid))
        return None


def _listening() -> dict[int, int]:
    """The processes that listen, by their ports; of several at one port the first. It reads all sockets of all."""
    pids: dict[int, int] = {}
    with suppress(OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.status == psutil.CONN_LISTEN and connection.pid is not None:
                pids.setdefault(connection.laddr.port, connection.pid)
    return pids


def command_of(pid: int) -> list[str]:
    """The command line of a process; nothing where it is gone, or this user may not read it."""
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def is_engine(command: Sequence[str]) -> bool:
    """Whether a command line starts an engine of some kind."""
    return _ENGINE_PROGRAMS.fullmatch(_program(command)) is not None


def is_service(pid: int) -> bool:
    """Whether a process here is a `refitd serve`."""
    command = command_of(pid)
    return PurePath(_program(command)).name == "refitd" and "serve" in command


def _program(command: Sequence[str]) -> str:
    """The program that runs: of Python, the module or the script."""
    first, *words = command or [""]
    if not PurePath(first).name.startswith("python"):
        return first
    rest = iter(words)
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word in _TAKES_A_WORD:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""


def _is_here(host: str, port: int) -> bool:
    """Whether a host is this one: then a datagram to it has the same source as destination."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                if probe.getsockname()[0] == address[0]:
                    return True
    return False


def environment_of(pid: int) -> Mapping[str, str] | None:
    """The variables that a process was started with; None where this user may not read them."""
    with suppress(psutil.Error):
        return psutil.Process(pid).environ()
    return None
