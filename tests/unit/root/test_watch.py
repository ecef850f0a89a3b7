"""Hints from the file system: events where they exist, polling where not."""

import asyncio
from pathlib import Path

import pytest

from refitd.catalog.catalog import Watcher
from refitd.root.ownership import file_system_of, wants_polling

MOUNTS = "/dev/vda / ext4 rw 0 0\nserver:/x /mnt/my\\040nfs nfs4 rw 0 0\nlustre /scratch lustre rw 0 0\n"


@pytest.mark.parametrize(
    ("path", "kind", "polled"),
    [
        ("/srv", "ext4", False),
        ("/mnt/my nfs/root", "nfs4", True),
        ("/scratch/x", "lustre", True),
        ("/scratchy", "ext4", False),
    ],
)
def test_network_file_systems_are_polled(path: str, kind: str, polled: bool) -> None:
    found = file_system_of(Path(path), MOUNTS)
    assert (found, wants_polling(found)) == (kind, polled)


@pytest.mark.parametrize("polls", [False, True])
async def test_a_version_that_is_renamed_into_place_is_a_hint(
    tmp_path: Path, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refitd.catalog.catalog.wants_polling", lambda _: polls)
    (tmp_path / "run/.incoming-x").mkdir(parents=True)
    hinted = asyncio.Event()
    watcher = asyncio.create_task(Watcher(tmp_path, asyncio.get_running_loop(), hinted.set).run())
    async with asyncio.timeout(20):
        number = 0
        while not hinted.is_set():  # the observer may still be starting
            (tmp_path / "run/.incoming-x").rename(tmp_path / f"run/v{number:06d}")
            (tmp_path / "run/.incoming-x").mkdir()
            number += 1
            await asyncio.sleep(0.05)
    watcher.cancel()
    await asyncio.wait({watcher})


async def test_what_the_service_does_itself_and_what_goes_is_no_hint(tmp_path: Path) -> None:
    (tmp_path / ".refitd").mkdir()
    hinted = asyncio.Event()
    watcher = asyncio.create_task(Watcher(tmp_path, asyncio.get_running_loop(), hinted.set).run())
    async with asyncio.timeout(20):
        while not hinted.is_set():
            (tmp_path / "marker").write_text("written, and closed")
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # events of the marker come to their end; nothing says when
        hinted.clear()
        for number in range(20):
            (tmp_path / f".refitd/{number}").touch()
        (tmp_path / "marker").unlink()
        await asyncio.sleep(0.1)
    assert not hinted.is_set()
    watcher.cancel()
    await asyncio.wait({watcher})
