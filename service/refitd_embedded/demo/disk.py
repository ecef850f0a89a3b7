"""What a folder holds on disk."""

import os
from pathlib import Path


def held(folder: Path) -> int:
    """Bytes of disk that the files beneath take, hard links counted once. What is deleted meanwhile does not count."""
    found: dict[tuple[int, int], int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                status = (Path(directory) / name).lstat()
            except FileNotFoundError:
                continue
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())
