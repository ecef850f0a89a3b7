"""The tests' tiny models, which take 12 core-seconds to make: runs of one clone find those of the run before."""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from support.servers import KIT

_SCRIPTS = ("make-models", "make-bad")
_MADE_WITH = ("torch", "transformers", "tokenizers", "safetensors")


def tiny_models(kept: Path, *width: str) -> Path:
    """A folder in `kept` with what `make-models` and `make-bad` of now write, as wide as this. Read only."""
    made_of = [(KIT / name).read_bytes() for name in _SCRIPTS]
    made_of += [" ".join([*map(version, _MADE_WITH), *width]).encode()]
    folder = kept / hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    if not folder.is_dir():
        making = kept / f"making-{folder.name}-{os.getpid()}"
        shutil.rmtree(making, ignore_errors=True)  # of a process of that number that was killed
        making.mkdir()
        for script, more in zip(_SCRIPTS, (width, ()), strict=True):
            subprocess.run([sys.executable, KIT / script, making, *more], check=True, capture_output=True)
        with suppress(OSError):  # another run was first
            making.rename(folder)
        shutil.rmtree(making, ignore_errors=True)
    return folder
