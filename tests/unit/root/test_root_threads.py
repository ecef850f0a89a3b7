"""A root whose file system hangs: callers stop waiting, nothing is believed of it, and it all goes on when it is back.

A hung network file system cannot be had without a server and its mount; here a call that waits for an event stands for
it, in the very threads.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.catalog import examining
from refitd.catalog import files as catalog_files
from refitd.catalog.examining import NoReference, References
from refitd.catalog.files import DiskFiles, Unreadable
from refitd.clock import SystemClock
from refitd.root.handle import RootHangsError, RootThreads
from refitd.root.scan import Listing, ListingFailed
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.validation.reference import read_reference
from support.checkpoints import publish, tensors, write_model

SOON = 0.05


class Hang:
    """A file system: its calls return once it is back."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.back.set()

    def __call__(self) -> None:
        self.back.wait()


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.back.set()


async def test_a_call_that_hangs_is_given_up_and_the_next_one_goes_on(hang: Hang) -> None:
    threads = RootThreads(most=2)
    hang.back.clear()
    with pytest.raises(RootHangsError, match=r"does not answer: listing took more than 0\.05 s"):
        await threads.run("listing", hang, within=SOON)
    assert await threads.run("looking", lambda: 7, within=10) == 7


async def test_calls_that_hang_take_so_many_threads_and_no_more_and_give_them_back(hang: Hang) -> None:
    threads = RootThreads(most=2)
    hang.back.clear()
    for _ in range(2):
        with pytest.raises(RootHangsError):
            await threads.run("a root that hangs", hang, within=SOON)
    before = threading.active_count()
    with pytest.raises(RootHangsError, match="looking"):
        await threads.run("looking", lambda: pytest.fail("there was no thread for it"), within=SOON)
    assert threading.active_count() == before
    hang.back.set()
    assert await threads.run("looking", lambda: 7, within=10) == 7


async def test_an_error_of_the_file_system_is_passed_on_as_it_is() -> None:
    def fails() -> None:
        raise TimeoutError("the server's own")

    with pytest.raises(TimeoutError, match="the server's own"):
        await RootThreads().run("looking", fails, within=10)


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    program = """
import asyncio, threading
from contextlib import suppress
from refitd.root.handle import RootHangsError, RootThreads

async def main():
    with suppress(RootHangsError):
        await RootThreads().run("a root that hangs", threading.Event().wait, within=0.01)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=False, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_nothing_is_believed_of_a_root_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    (tmp_path / SERVICE_FOLDER).mkdir()
    publish(tmp_path, "run", 1, tensors(1))
    files = DiskFiles(tmp_path, hang)
    before = await files.signatures(["run/v000001"])
    hang.back.clear()
    with monkeypatch.context() as impatient:
        impatient.setattr(catalog_files, "LOOK_TIMEOUT_SECONDS", SOON)
        impatient.setattr(catalog_files, "LISTING_SECONDS", SOON)
        listing = await files.scan()
        assert isinstance(listing, ListingFailed)
        assert "does not answer" in listing.reason
        assert isinstance((await files.signatures(["run/v000001"]))["run/v000001"], Unreadable)
        with pytest.raises(RootHangsError):
            await files.structure("run/v000001")
    hang.back.set()
    assert isinstance(await files.scan(), Listing)
    assert await files.signatures(["run/v000001"]) == before


async def test_a_cancelled_call_frees_its_caller_at_once(hang: Hang) -> None:
    hang.back.clear()
    call = asyncio.create_task(RootThreads().run("looking", hang))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_base_model_that_hangs_rejects_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    """What nobody could look at says nothing of a version: it is tried again."""
    base = write_model(tmp_path / "base")
    journal = Journal(tmp_path / "state")
    references = References(Store(journal, SystemClock()), base)

    def slow(path: Path) -> Reference:
        hang()
        return read_reference(path)

    monkeypatch.setattr(examining, "read_reference", slow)
    hang.back.clear()
    with monkeypatch.context() as impatient:
        impatient.setattr(examining, "LISTING_SECONDS", SOON)
        found = await references.of("run")
    assert isinstance(found, NoReference)
    assert not found.final
    hang.back.set()
    assert isinstance(await references.of("run"), Reference)
    journal.close()
