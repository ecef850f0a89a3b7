"""A root in memory, and the service's half of slots: a version that nobody needs is handed back."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from refitd_client.checkpoint.header import layout
from refitd_client.contract.naming import layout_of, slot_name, slots_path

RUN = "bench"
_NUMBERS = count(1)


@contextmanager
def fresh_root(folder: Path) -> Iterator[Path]:
    """An empty root, removed in the end."""
    root = Path(tempfile.mkdtemp(prefix="root-", dir=folder))
    try:
        yield root
    finally:
        shutil.rmtree(root)


def hand_back(root: Path, version: Path) -> None:
    """What the service does, without its syncs: what is measured is the trainer's side."""
    for path in version.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    slot = root / slots_path(RUN) / slot_name(layout_of(map(layout, version.iterdir())), f"{next(_NUMBERS):032x}")
    slot.parent.mkdir(parents=True, exist_ok=True)
    version.rename(slot)
