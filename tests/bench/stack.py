"""The processes that a benchmark runs on: recorded engines and a refitd, each a real process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

RECORDER = Path(__file__).parent / "recorder.py"
MANY = 100


@contextmanager
def process(command: list[str], log: Path, ready: str, count: int = 1) -> Generator[tuple[int, list[str]]]:
    """Run a command; yield its pid and the addresses of its `ready on` lines. Ends it by SIGTERM."""
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=_environment()
        )
    try:
        yield child.pid, _addresses(child, ready, count, log)
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(30)
        if child.stdout is not None:
            child.stdout.close()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    return kept | {"OMP_NUM_THREADS": "1"}


def _addresses(child: "subprocess.Popen[str]", ready: str, count: int, log: Path) -> list[str]:
    found: list[str] = []
    if child.stdout is None:
        raise RuntimeError("no output to wait for")
    for line in child.stdout:
        found += re.findall(rf'{ready} ready on ([^\s"]+)', line)
        if len(found) == count:
            return found
    raise RuntimeError(f"{ready} ended before it was ready:\n{log.read_text()[-2000:]}")


@contextmanager
def engines(model: Path, folder: Path, count: int = 1, *, load_seconds: float = 0.0) -> Generator[list[str]]:
    """Recorded engines in one process, each load that much longer; yields their URLs."""
    command = [sys.executable, str(RECORDER), "--model-path", str(model), "--port", "0", "--replicas", str(count)]
    command += ["--load-delay", str(load_seconds)]
    with process(command, folder / "engines.log", "refitd_embedded", count) as (_, urls):
        yield urls


@contextmanager
def refitd(
    root: Path, folder: Path, urls: list[str], *more: str, count: int | None = None
) -> Generator[tuple[int, str]]:
    """A service; yields its pid and its URL once every engine is in sync with nothing.

    Args:
        root: the root.
        folder: for its state and its log.
        urls: of the engines that its command names.
        more: of its command.
        count: engines that there are, where `more` names them.
    """
    command = [sys.executable, "-m", "refitd", "serve", "--root", str(root), "--state", str(folder / "state")]
    command += ["--port", "0", *more]
    for url in urls:
        command += ["--engine", url]
    with process(command, folder / "refitd.log", "refitd") as (pid, (url,)):
        _await_engines(url, len(urls) if count is None else count)
        yield pid, url


def _await_engines(url: str, count: int) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
        while True:
            items = http.get("/v1/engines").json()["items"]
            if len(items) == count and all(item["state"] != "PROBING" for item in items):
                return
            time.sleep(0.1 if count > MANY else 0.0)  # what is looked for is not to be what is waited for


def calls(url: str) -> list[tuple[float, str]]:
    """The calls that an engine has had since the last time, as (monotonic seconds, path)."""
    return [(at, path) for at, path in httpx.get(f"{url}/_calls", trust_env=False).json()]


def first_call(url: str) -> float:
    """When the first of them arrived."""
    return min(at for at, _ in calls(url))
