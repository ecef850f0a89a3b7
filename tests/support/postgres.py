"""A real PostgreSQL for tests, by the programs of Debian's package. It is stopped and deleted with its context."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import psycopg

_READY_SECONDS = 60
ABSENT = "PostgreSQL is not here: tests/postgres/install gets it"


def programs() -> Path | None:
    """The folder with initdb and postgres; None where there is none."""
    on_path = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    found = [*([Path(on_path).resolve().parent] if on_path else []), *reversed(debian)]
    return next((folder for folder in found if (folder / "postgres").exists() and (folder / "initdb").exists()), None)


@dataclass
class PostgresServer:
    """One server on loopback. `start` and `kill` may be called again and again; what was committed stays."""

    folder: Path
    port: int
    _process: "subprocess.Popen[bytes] | None" = None
    _names: "count[int]" = field(default_factory=count)

    def database(self) -> str:
        """The URI of a new, empty database."""
        name = f"group_{os.getpid()}_{next(self._names)}"
        with psycopg.connect(self.uri("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.uri(name)

    def uri(self, name: str) -> str:
        """The URI of a database."""
        return f"postgresql://refitd@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        folder = programs()
        assert folder is not None
        options = ["fsync=off", "jit=off", "listen_addresses=127.0.0.1", "max_connections=100", "shared_buffers=16MB"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [folder / "postgres", "-D", self.folder / "data", "-k", self.folder, "-p", str(self.port)]
                + [part for option in options for part in ("-c", option)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                **_as_another(),
            )
        ends = time.monotonic() + _READY_SECONDS
        while True:
            try:
                psycopg.connect(self.uri("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                assert time.monotonic() < ends, (self.folder / "log").read_text()[-2000:]
                assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.05)
            else:
                return

    def kill(self, number: int = signal.SIGQUIT) -> None:
        """End it at once, as a crash does: connections break and nothing is said to clients."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_READY_SECONDS)
            self._process = None

    def signal_all(self, number: int) -> None:
        """Send a signal to the server and to each of its processes, as SIGSTOP, of which clients hear nothing."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        for process in (server, *server.children()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _as_another() -> dict[str, object]:
    """PostgreSQL refuses to run as root: the user postgres, where there is one, or nobody."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise AssertionError("root, and no other user is here to run PostgreSQL as")


@contextmanager
def running_postgres() -> Generator[PostgresServer]:
    """Run a server."""
    folder = programs()
    assert folder is not None, ABSENT
    home = Path(tempfile.mkdtemp(prefix="refitd-postgres-"))
    another = _as_another()
    if another:
        os.chown(home, int(str(another["user"])), int(str(another["group"])))
    try:
        making = [folder / "initdb", "-D", home / "data", "-U", "refitd", "-A", "trust", "-E", "UTF8", "--no-sync"]
        done = subprocess.run([*making, "--locale=C"], check=False, capture_output=True, text=True, cwd="/", **another)
        assert done.returncode == 0, done.stderr
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            server = PostgresServer(home, free.getsockname()[1])
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(home, ignore_errors=True)
