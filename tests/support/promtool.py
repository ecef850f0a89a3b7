"""promtool, which comes with Prometheus."""

import os
import shutil
from pathlib import Path

_TREE = Path(__file__).parents[2]
WHY_NOT = "promtool is not here: tests/prometheus/install .promtool (make test does), or name it: REFITD_PROMTOOL"


def promtool() -> str | None:
    """Its path, None where there is none."""
    named = os.environ.get("REFITD_PROMTOOL") or shutil.which("promtool")
    ours = _TREE / ".promtool/promtool"
    return named or (str(ours) if ours.exists() else None)
