"""Threads of the service share memory that was freed."""

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from refitd import app, memory
from refitd.root.ownership import StartRefusedError
from refitd.settings import Settings

_ARENAS = """
import ctypes, sys, threading
from refitd.memory import share_arenas
if "shared" in sys.argv:
    assert share_arenas()
here = threading.Barrier(8)
def allocate():
    kept = bytearray(100_000)
    here.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


def _arenas(*arguments: str) -> int:
    said = subprocess.run([sys.executable, "-c", _ARENAS, *arguments], capture_output=True, text=True, check=True)
    return said.stdout.count("<heap nr=")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in another way")
def test_threads_share_one_arena_of_freed_memory() -> None:
    assert _arenas("shared") == memory.ARENAS < _arenas()


def test_with_another_c_library_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    assert memory.share_arenas() is False


def test_the_service_does_so_before_it_starts_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []

    def refused(_: object) -> None:
        done.append("starts")
        raise StartRefusedError("far enough")

    monkeypatch.setattr(app, "share_arenas", lambda: done.append("shares arenas"))
    monkeypatch.setattr(app, "server_tls", refused)
    assert app.serve(Settings(root=tmp_path)) == 1
    assert done == ["shares arenas", "starts"]
