"""Stops a publication at its k-th change to the file system: the seam of the publisher's crash tests."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.checkpoint import header
from refitd_client.contract.naming import layout_of, slot_name, slots_path
from refitd_client.files import durable

LEAVES = (
    "make_folder",
    "create",
    "write",
    "write_at",
    "overwrite",
    "touch",
    "resize",
    "clone",
    "sync",
    "sync_folder",
    "rename",
    "remove_file",
)
COMPOUNDS = ("make_folders", "remove_folder", "write_file", "replace_file")  # made of leaves

Strike = Callable[[str, Callable[..., Any], tuple[Any, ...]], None]


def on_each_effect(act: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], None]) -> dict[str, Any]:
    """Call `act(number, name, effect, arguments)` before each effect. Returns the originals, by name."""
    originals = {name: getattr(durable, name) for name in LEAVES}
    count = 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def effect(*args: Any) -> Any:
            nonlocal count
            count += 1
            act(count, name, original, args)
            return original(*args)

        return effect

    for name, original in originals.items():
        setattr(durable, name, wrap(name, original))
    return originals


def restore(originals: dict[str, Any]) -> None:
    """Undo `on_each_effect`."""
    for name, original in originals.items():
        setattr(durable, name, original)


def weights(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Two shards' worth, when cut at 256 bytes, different in each step."""
    return {"a": np.full((8, 4), step, np.float32), "b": np.full((16, 4), -step, np.float32)}


def make_base(folder: Path) -> Path:
    """A base model that is a configuration and no more."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Toy"]}')
    return folder


def publish(root: Path, step: int, base: Path) -> None:
    """What a trainer does that was (re)started."""
    with WeightPublisher(root, "run", options=PublishOptions(base_model=base, max_shard_bytes=256)) as publisher:
        publisher.publish(weights(step), step=step)


def make_slot(root: Path) -> Path:
    """A slot that fits `weights`, as a service hands it back."""
    with WeightPublisher(
        root.parent / f"{root.name}-old", "run", options=PublishOptions(max_shard_bytes=256)
    ) as publisher:
        old = publisher.publish(weights(0), step=0).path
    for path in old.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    layout = layout_of(header.layout(path) for path in old.iterdir())
    slot = root / slots_path("run") / slot_name(layout, uuid4().hex)
    slot.parent.mkdir(parents=True, exist_ok=True)
    old.rename(slot)
    shutil.rmtree(root.parent / f"{root.name}-old")
    return slot


def kill_at(number: int, root: Path, base: Path, *, recycle: bool) -> None:
    """Publish step 1, and step 2 until the effect of that number; a write is torn in the middle."""
    publish(root, 1, base)
    if recycle:
        make_slot(root)

    def act(count: int, name: str, original: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if count == number:
            if name in {"write", "write_at", "overwrite"}:
                target, data, *offset = args
                original(target, data[: len(data) // 2], *offset)
            os.kill(os.getpid(), signal.SIGKILL)

    on_each_effect(act)
    publish(root, 2, base)


def kill_at_each(folder: Path, until: Callable[[int, Path], object]) -> None:
    """Make `<folder>/<k>`, the root that a kill at effect k leaves, for each k until it comes through."""
    number = 0
    while True:
        number += 1
        root = folder / f"{number:03d}"
        root.mkdir()
        child = os.fork()
        if child == 0:
            until(number, root)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    made, slot = Path(sys.argv[2]), "slot" in sys.argv[3:]
    kill_at_each(Path(sys.argv[1]), lambda number, root: kill_at(number, root, made, recycle=slot))
