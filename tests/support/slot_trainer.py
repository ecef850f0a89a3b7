"""A trainer that writes a version into a slot, block by block, and says how far it is; and memory instead of a GPU's.

Machines of CI have no GPU: `begin_move` copies at once here, and files are mapped instead of being registered.
"""

import ctypes
import mmap
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from hypothesis import strategies as st

from refitd_client.checkpoint.finite import rule_of
from refitd_client.contract.naming import INCOMING_PREFIX
from refitd_client.fingerprint.tensors import ScanInput, scan
from refitd_client.write.progress import WriteProgress
from refitd_plugin.copy_ahead import BufferCopy, buffer_copy
from refitd_plugin.moves import MemoryMove
from refitd_plugin.proving import Reading, layout_of
from refitd_plugin.registered import Registered
from refitd_plugin.source import _TORCH, VersionSource, mapped, place_of
from refitd_plugin.staging import FileOnDevice, StagingLease
from refitd_plugin.trainer_follower import Ahead, Files, Layout, TrainerFollower

BLOCK = 65_536  # bytes that a trainer writes at a time


class MappedFiles:
    """Files that are known once they were read, by inode, as those that are registered."""

    def __init__(self) -> None:
        self._files: dict[int, Any] = {}

    def of(self, fd: int) -> Any:
        inode = os.fstat(fd).st_ino
        if inode not in self._files:
            memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            self._files[inode] = type("Mapped", (), {"address": address, "memory": memory})()
        return self._files[inode]

    def known(self, fd: int) -> Registered | None:
        return cast("Registered | None", self._files.get(os.fstat(fd).st_ino))


class HostBuffer:
    """Room for one version, as `StagingBuffer`."""

    def __init__(self) -> None:
        self._memory = np.zeros(8 * 2**20, np.uint8)
        self._lease: ref[StagingLease] | None = None

    def take(self, files: Mapping[str, tuple[int, int]]) -> dict[str, FileOnDevice] | None:
        if self._lease is not None and self._lease() is not None:
            return None
        lease, end, places = StagingLease(), 0, dict[str, int]()
        for name, (size, begin) in files.items():
            places[name] = -(-(end + begin) // 512) * 512 - begin
            end = places[name] + size
        self._lease = ref(lease)
        base = int(self._memory.ctypes.data)
        return {name: FileOnDevice(base + place, lease) for name, place in places.items()}


class AheadReader:
    """Reads what was copied to the buffer. The class is a `TensorReader`."""

    def __init__(self) -> None:
        self.wants_files = True
        self.files, self.moved, self.copied = MappedFiles(), list[MemoryMove](), Event()
        self.buffer = HostBuffer()
        self.ahead = TrainerFollower(self.files.known, self.start, nullcontext, lambda: self.wants_files)

    def start(self, files: Files, layout: Layout) -> BufferCopy | None:
        return buffer_copy(files, layout, self.buffer.take, self.move)

    def move(self, move: MemoryMove, above: int) -> None:
        ctypes.memmove(move.target, above + move.source, move.width)
        self.moved.append(move)
        self.copied.set()

    def read(self, source: VersionSource, names: Sequence[str]) -> Reading | None:
        files: dict[str, Any] = {}
        for name in source.structure.headers:
            with (source.place.folder / name).open("rb") as file:
                files[name] = self.files.of(file.fileno())
        seen = source.structure
        found, ahead = self.ahead.finished(source.place, files, layout_of(source, names))
        assert isinstance(found, BufferCopy)
        staged = found.taken()
        tensors: dict[str, ScanInput] = {}
        for file, header in seen.headers.items():
            for name, spec in header.tensors.items():
                size, dtype = spec.end - spec.start, getattr(torch, _TORCH[spec.dtype])
                data = bytes_at(staged[file].address + header.data_start + spec.start, size)
                tensor = torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
                tensors[name] = ScanInput(tensor.reshape(spec.shape), rule_of(spec.dtype), is_view=True)
        return Reading(scan(tensors[name] for name in names), staged, ahead)


def bytes_at(address: int, size: int) -> bytes:
    """What is in memory there."""
    return ctypes.string_at(address, size)


class SlotTrainer:
    """Writes the files of version `wanted` into the pages of version `old`, whose slot it has taken.

    `shards` are those that its `.progress` is about, where they are others than there are.
    """

    def __init__(
        self, old: VersionSource, wanted: VersionSource, *, number: int = 0, shards: Sequence[str] | None = None
    ) -> None:
        self.folder = old.place.folder.parent / f"{INCOMING_PREFIX}{number}"
        self._root, self._wanted = old.place.root, wanted.place.folder
        self.names = sorted(old.structure.headers)
        self.sizes = {name: old.structure.files[name].size for name in self.names}
        for path in old.place.folder.iterdir():
            if path.name not in self.names:
                path.unlink()
        old.place.folder.rename(self.folder)
        self.progress = WriteProgress(self.folder, self.names if shards is None else shards)

    def write(self, name: str, begin: int, end: int, data: bytes | None = None) -> None:
        """Write bytes of a shard: those of the version that is wanted, or others."""
        right = (self._wanted / name).read_bytes()[begin:end]
        with (self.folder / name).open("r+b") as file:
            file.seek(begin)
            file.write(right if data is None else data)

    def write_all(self, *, block: int = 50_000) -> None:
        """Write everything and say so, block by block."""
        for name in self.names:
            for begin in range(0, self.sizes[name], block):
                end = min(begin + block, self.sizes[name])
                self.write(name, begin, end)
                self.progress.reached(name, end)

    def commit(self, step: int) -> VersionSource:
        """Give the version its manifest and its name."""
        self.progress.remove()
        self.progress.close()
        for path in self._wanted.iterdir():
            if path.name not in self.names:
                shutil.copyfile(path, self.folder / path.name)
        target = self.folder.parent / f"v{step:06d}"
        self.folder.rename(target)
        return mapped(place_of(str(target), self._root))


def bytes_of(folder: Path, names: Mapping[str, Any]) -> dict[str, bytes]:
    """The content of files."""
    return {name: (folder / name).read_bytes() for name in names}


def _write_and_wait(folder: Path, old: str, sizes: dict[str, int], blocks: int) -> None:
    """In a process of its own: some blocks of other bytes, and then nothing until it is killed."""
    Path(old).rename(folder)
    progress, left = WriteProgress(folder, sizes), blocks
    for name, size in sorted(sizes.items()):
        for begin in range(0, size, BLOCK):
            if left == 0:
                signal.pause()
            end = min(begin + BLOCK, size)
            with (folder / name).open("r+b") as file:
                file.seek(begin)
                file.write(b"\x07" * (end - begin))
            progress.reached(name, end)
            left -= 1
    signal.pause()


STEPS = st.lists(
    st.tuples(st.sampled_from(["right", "wrong", "follow", "follow too far"]), st.integers(0, 8), st.integers(0, 6)),
    max_size=40,
)
"""What a trainer and a rank that follows it may do, in any order: what, which file, which block."""


def scribble(trainer: SlotTrainer, ahead: Ahead, steps: Sequence[tuple[str, int, int]]) -> None:
    """Write blocks wrong and right and wrong again, and follow at any time, also before they are written."""
    for what, at, block in steps:
        name = trainer.names[at % len(trainer.names)]
        begin = min(block * BLOCK, trainer.sizes[name])
        end = min(begin + BLOCK, trainer.sizes[name])
        match what:
            case "right":
                trainer.write(name, begin, end)
            case "wrong":
                trainer.write(name, begin, end, bytes([at + 1]) * (end - begin))
            case _:
                ahead.advance(name, end if what == "follow" else end + 2**40)


class NoRenames:
    """No thread that follows: the test takes the steps."""

    def watch(self, folder: int) -> None:
        """Nothing."""


@contextmanager
def killed_in_mid_write(old: VersionSource, blocks: int, *, into: str = ".incoming-dead") -> Iterator[None]:
    """A trainer in a process of its own that takes the slot of version `old`, writes so many blocks of other bytes, and
    waits. It is killed at the end of the context; its folder stays.
    """
    sizes = {name: old.structure.files[name].size for name in old.structure.headers}
    for path in old.place.folder.iterdir():
        if path.name not in sizes:
            path.unlink()
    dead = old.place.folder.parent / into
    arguments = (dead, str(old.place.folder), sizes, blocks)
    process = multiprocessing.get_context("fork").Process(target=_write_and_wait, args=arguments)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
