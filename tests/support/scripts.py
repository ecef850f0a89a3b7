"""Scripts of users that train, forked from a process that has imported their trainers: tests/trainers/template."""

import os
import sys
from pathlib import Path

from support.engine_template import TESTS, ForkedEngine, template


def script_ended(script: Path, *words: object, **variables: str) -> tuple[int, str]:
    """Run a script to its end; its exit status, and all that it printed, errors too."""
    orders = template(Path(sys.executable), TESTS / "trainers/template")
    forked = ForkedEngine(orders, [str(script), *map(str, words)], os.environ | variables)
    with forked.stdout as out:
        said = out.read().decode()
    return forked.wait(), said
