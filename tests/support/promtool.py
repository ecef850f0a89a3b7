"""Prometheus and its promtool."""

import os
import shutil
from pathlib import Path

_TREE = Path(__file__).parents[2]
WHY_NOT = "promtool is not here: tests/prometheus/install .promtool (make test does), or name it: REFITD_PROMTOOL"


def promtool() -> str | None:
    """Its path, None where there is none."""
    return _found("promtool")


def prometheus() -> str | None:
    """The server's path, None where there is none."""
    return _found("prometheus")


def _found(name: str) -> str | None:
    named = os.environ.get(f"REFITD_{name.upper()}") or shutil.which(name)
    ours = _TREE / ".promtool" / name
    return named or (str(ours) if ours.exists() else None)
