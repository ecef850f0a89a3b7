"""Reading ahead: all of a version is in the page cache again before an engine begins to load it."""

import asyncio
import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from refitd.root.ownership import root_file_system
from refitd_inside.materialize.materializer import Warmer

SIZE = 32 * 2**20  # more than a kernel reads ahead at a time


def share_in_memory(path: Path) -> float:
    """How much of a file the page cache has (mincore(2)); to read it would change that."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        pages = np.frombuffer(content, np.uint8)
        found = np.zeros(len(pages) // mmap.PAGESIZE, np.uint8)
        assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (pages.ctypes.data, len(pages), found.ctypes.data))) == 0
        del pages
    return float((found & 1).mean())


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file of a version that the page cache has forgotten."""
    path = tmp_path / "run/v000001/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if share_in_memory(path):
        pytest.skip("this file system lets no page go")
    return path


def test_a_version_that_was_forgotten_is_read_to_its_end(tmp_path: Path, shard: Path) -> None:
    asyncio.run(Warmer(tmp_path, lambda: root_file_system(tmp_path)).warm("run/v000001"))
    ends = time.monotonic() + 10
    # Linux reads as much of what it is advised about as it sees fit, and it may leave single pages out. Where it is
    # advised about the whole file in one call, it reads 128 KiB of it.
    while share_in_memory(shard) < 0.9:
        assert time.monotonic() < ends, share_in_memory(shard)
        time.sleep(0.01)


async def test_what_is_in_memory_already_is_not_read(tmp_path: Path, shard: Path) -> None:
    await Warmer(tmp_path, lambda: "tmpfs").warm("run/v000001")
    assert share_in_memory(shard) == 0


async def test_what_cannot_be_read_is_for_the_load_to_find(tmp_path: Path) -> None:
    await Warmer(tmp_path, lambda: "ext4").warm("run/v000009")
