"""What a signal handler, or a function that the publisher calls, may do in the middle of a publication.

Each process sends itself SIGTERM at a named place, and goes on there when the handler has returned.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import PublishError, PublishOptions, WeightPublisher
from refitd_client.sharded.follower import Follower
from support.ranks import run_ranks

_HANDLED = """
import os, signal, sys, threading
import numpy as np
from refitd_client import PublishError, PublishOptions, WeightPublisher
from refitd_client.files import durable
from refitd_client.publish.attempt import PublishAttempt
from refitd_client.publish.publication import Background
from refitd_client.publish.run_folder import RunFolder
from refitd_client.write.content import WeightsReader

PLACES = {
    "placed": (RunFolder, "begun"), "read": (WeightsReader, "content"), "made": (durable, "create"),
    "synced": (durable, "sync"), "recorded": (RunFolder, "record"), "named": (durable, "rename"),
    "told": (PublishAttempt, "announce"), "begun": (Background, "begin"),
}
root, place, call, block = sys.argv[1:]
entered, handled = threading.Event(), threading.Event()

def handler(*_):
    entered.set()
    try:
        if call == "close":
            publisher.close()
        elif call == "exit":
            sys.exit(3)
        else:
            for ask in (lambda: publisher.begins(9), lambda: publisher.publish(weights, step=9)):
                try:
                    ask()
                except PublishError as error:
                    print("refused", error)
    finally:
        handled.set()

def interrupted(*args, **options):
    if not handled.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        in_background = threading.current_thread().name.startswith("refitd-publisher")  # close waits for it
        assert (entered if in_background else handled).wait(60)
    return original(*args, **options)

weights = {f"w{n}": np.ones((64, 64), np.float32) for n in range(4)}
signal.signal(signal.SIGTERM, handler)
publisher = WeightPublisher(root, "run", options=PublishOptions(max_shard_bytes=20000))
owner, name = PLACES[place]
original = getattr(owner, name)
setattr(owner, name, interrupted)
try:
    publication = publisher.publish(weights, step=1, block=block)
    if block == "staged":
        publication.committed(60)
    print("published")
except PublishError as error:
    print("ended", error)
WeightPublisher(root, "run").close() if call == "close" else publisher.close()
print("free")
"""


def run(root: Path, place: str, call: str, block: str = "committed") -> tuple[int, str]:
    """The process's exit status, and what it printed."""
    command = [sys.executable, "-c", _HANDLED, str(root), place, call, block]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def left(root: Path) -> list[str]:
    """Versions and folders that are being written."""
    return sorted(path.name for path in (root / "run").iterdir() if path.name.startswith(("v0", ".incoming")))


@pytest.mark.parametrize("block", ["committed", "staged"])
@pytest.mark.parametrize("place", ["placed", "read", "made"])
def test_close_in_a_handler_ends_the_publication_and_frees_the_run(tmp_path: Path, place: str, block: str) -> None:
    """The step can be published again."""
    status, told = run(tmp_path, place, "close", block)
    assert (status, left(tmp_path)) == (0, []), told
    assert "ended the publisher was closed in the middle of a publication" in told
    assert "free" in told
    with WeightPublisher(tmp_path, "run") as publisher:
        assert publisher.begins(1) is None


@pytest.mark.parametrize("place", ["placed", "read", "made", "synced", "recorded", "named"])
def test_another_call_in_a_handler_is_refused_and_the_publication_goes_on(tmp_path: Path, place: str) -> None:
    """It would have to wait for what it interrupts."""
    status, told = run(tmp_path, place, "others")
    assert (status, left(tmp_path)) == (0, ["v000001"]), told
    assert "refused begins was called in the middle of publish" in told
    assert "refused publish was called in the middle of publish" in told
    assert "published\nfree" in told


def _closed_in_a_handler(rank: int, _: int, root: Path, closes: int) -> list[str]:
    told: list[str] = []
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=60))
    opened = Follower.open

    def open_interrupted(*args: Any) -> Any:
        if rank == closes:
            os.kill(os.getpid(), signal.SIGTERM)
        return opened(*args)

    def handle(*_: object) -> None:
        try:
            publisher.publish({}, step=9)
        except PublishError as error:
            told.append(str(error))
        publisher.close()

    signal.signal(signal.SIGTERM, handle)
    setattr(Follower, "open", open_interrupted)  # noqa: B010 - in this process alone
    try:
        publisher.publish({"w": torch.ones(64, 64)}, step=1)
    except PublishError as error:
        told.append(str(error))
    publisher.close()
    return told


@pytest.mark.parametrize("closes", [0, 1])
def test_a_rank_that_is_closed_in_a_handler_ends_the_publication_on_all_ranks(tmp_path: Path, closes: int) -> None:
    """And a second publication there is refused."""
    told = run_ranks(2, tmp_path, _closed_in_a_handler, tmp_path, closes)
    assert "publish was called in the middle of publish" in told[closes][0]
    assert all("closed" in each[-1] for each in told), told
    assert left(tmp_path) == []
    WeightPublisher(tmp_path, "run").close()
