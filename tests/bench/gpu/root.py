"""A root in memory."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = "bench"


@contextmanager
def fresh_root(folder: Path) -> Iterator[Path]:
    """An empty root, removed in the end."""
    root = Path(tempfile.mkdtemp(prefix="root-", dir=folder))
    try:
        yield root
    finally:
        shutil.rmtree(root)
