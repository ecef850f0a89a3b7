"""Publications on a real disk, mirrored effect by effect in a model of one."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_model import Disk, Tree

from refitd_client.files.plain_file import FileLock
from refitd_client.lanes import Lanes
from refitd_client.publish import run_folder
from refitd_client.write import cuda, device_shards
from refitd_client.write import version_folder as staging
from support import durable_effects
from support.host_gpu import trainer_gpu

SYNCS = frozenset({"sync", "sync_folder"})


class Mirror:
    """`before_each` is called before each effect. `deaf` effects happen on the real disk and not in the model."""

    def __init__(self, disk: Disk, before_each: Callable[[int], None], deaf: frozenset[str] = frozenset()) -> None:
        self.disk = disk
        self._before_each = before_each
        self._deaf = deaf

    def __call__(self, number: int, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """See `durable_effects.on_each_effect`."""
        self._before_each(number)
        if name not in self._deaf:
            self._take(name, args)

    def _take(self, name: str, args: tuple[Any, ...]) -> None:
        match name, args:
            case "make_folder", (path,):
                self.disk.make_folder(str(path))
            case "create", (path, *_):
                self.disk.create(str(path))
            case "touch", _:
                pass  # the model has no times
            case "sync", (fd,):
                self.disk.sync(_path_of(fd))
            case "sync_folder", (path, *_):
                self.disk.sync_folder(str(path))
            case "rename", (old, new):
                self.disk.rename(str(old), str(new))
            case "remove_file", (path,):
                self.disk.remove(str(path))
            case _:
                self._take_bytes(name, args)

    def _take_bytes(self, name: str, args: tuple[Any, ...]) -> None:
        match name, args:
            case "write", (fd, data):
                self.disk.write(_path_of(fd), os.lseek(fd, 0, os.SEEK_CUR), bytes(data))
            case "write_at", (fd, data, offset):
                self.disk.write(_path_of(fd), offset, bytes(data))
            case "overwrite", (file, data, offset):
                self.disk.write(_path_of(file.fd), offset, bytes(data))
            case "clone", (source, target):
                self.disk.write(_path_of(target), 0, Path(_path_of(source)).read_bytes())
            case _:
                raise AssertionError(f"an effect that the model does not know: {name}{args}")

    def lock(self, path: Path, mode: int = 0o666, *, patience: float = 0.0) -> FileLock:
        """Locks are the one thing that the publisher makes past `durable`: their files' bytes do not matter."""
        if not path.exists():
            self.disk.create(str(path))
        return FileLock(path, mode, patience=patience)


def from_gpu(mirror: Mirror, patch: pytest.MonkeyPatch) -> None:
    """Have what `durable_effects.publish` publishes count as a GPU's.

    All is done in one thread, so that the effects have one order. A copy to a mapped file is no change by `durable`.
    """
    trainer_gpu(patch)
    patch.setattr(device_shards, "Lanes", lambda _: Lanes(0))
    arrays, copy = durable_effects.weights, cuda.DeviceCopies.copy

    def mirrored_copy(copies: Any, source: Any, begin: int, end: int, file: Any, offset: int) -> None:
        copy(copies, source, begin, end, file, offset)
        if file.mapped is not None:
            mirror.disk.write(_path_of(file.fd), offset, bytes(file.get(offset, end - begin)))

    patch.setattr(cuda.DeviceCopies, "copy", mirrored_copy)
    patch.setattr(
        durable_effects, "weights", lambda step: {name: torch.from_numpy(each) for name, each in arrays(step).items()}
    )


@contextmanager
def mirrored(mirror: Mirror, patch: pytest.MonkeyPatch) -> Generator[None]:
    """Have every effect of a publication mirrored."""
    for module in (staging, run_folder):
        patch.setattr(module, "FileLock", mirror.lock)
    originals = durable_effects.on_each_effect(mirror)
    try:
        yield
    finally:
        durable_effects.restore(originals)
        patch.undo()


def tree_of(folder: Path) -> Tree:
    """What lies in a folder."""
    return {path.name: tree_of(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def plant(folder: Path, tree: Tree) -> None:
    """Make a folder with that in it."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            plant(folder / name, node)
        else:
            (folder / name).write_bytes(node)


def _path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())
