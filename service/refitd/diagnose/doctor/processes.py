"""What can be seen of an engine that runs on this host: its process, by the port it listens on (Linux's /proc).

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

PROC = Path("/proc")
_LISTENS = "0A"
_MOST_BYTES = 2**20
# Modules, scripts, and what SGLang calls its own processes (sglang::tokenizer_worker).
_ENGINES = re.compile(r"(?:.*/)?sglang(?:\.\S+|::.*|/launch_server\.py)?|refitd_embedded(?:\.\S+)?")
_TAKES_A_WORD = frozenset({"-X", "-W"})  # options of Python


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProcess:
    """An engine's process. `environment` is None where this user may not read it."""

    pid: int
    environment: Mapping[str, str] | None

    def reads(self, path: str) -> str | None:
        """Read a file as the process sees it; None where there is none, or this user may not read it."""
        with suppress(OSError, UnicodeDecodeError):
            return (PROC / str(self.pid) / "root" / path.lstrip("/")).read_text()
        return None

    @property
    def can_be_seen(self) -> bool:
        """Whether this user may look at files as the process sees them."""
        with suppress(OSError):
            return (PROC / str(self.pid) / "root" / "proc").exists()
        return False


def local_process(url: str) -> LocalProcess | None:
    """The engine's process that answers at a URL; None where it is on another host, or another program answers."""
    pid = listener(url)
    if pid is None or not any(is_engine(command_of(one)) for one in (pid, _parent(pid)) if one is not None):
        return None
    return LocalProcess(pid=pid, environment=environment_of(pid))


def listener(url: str) -> int | None:
    """The process on this host that listens at a URL's port; None where none can be seen."""
    at = httpx.URL(url)
    port = at.port or (443 if at.scheme == "https" else 80)
    if not _is_here(at.host, port):
        return None
    sockets: set[str] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    return next((pid for pid in _pids() if sockets & _open_files(pid)), None) if sockets else None


def command_of(pid: int) -> list[str]:
    """The command line of a process; nothing where it is gone."""
    with suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    return []


def is_engine(command: Sequence[str]) -> bool:
    """Whether a command line starts an SGLang, or refitd's embedded engine."""
    return _ENGINES.fullmatch(_program(command)) is not None


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


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _open_files(pid: int) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()))
    return found


def environment_of(pid: int) -> Mapping[str, str] | None:
    """The variables that a process was started with; None where this user may not read them."""
    try:
        with (PROC / str(pid) / "environ").open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    return {name: value for name, equals, value in (entry.partition("=") for entry in text.split("\0")) if equals}


def is_running(pid: int) -> bool:
    """Whether there is such a process here."""
    return (PROC / str(pid)).exists()


def family_of(pid: int) -> set[int]:
    """A process and all that it started."""
    parents = {other: _parent(other) for other in _pids()}
    family, size = {pid}, 0
    while len(family) > size:
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family


def _parent(pid: int) -> int | None:
    with suppress(OSError, IndexError, ValueError):
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return None
