"""Runs the whole service, as `refitd serve` does, in children that die where they are told to.

For each line of JSON on stdin a child is forked, which costs a tenth of a fresh interpreter; a line on stdout says when
it listens (refitd's own), when it is armed (after SIGUSR1), and how it ended.
"""

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mortal import Life

from refitd import app
from refitd.settings import Settings


def live(order: dict[str, Any]) -> int:
    """Be the service."""
    life = Life(Path(order["log"]), order["die_at"], order["die_on"], armed=order["armed"])

    def arm(*_: object) -> None:
        life.arm()
        print("armed", flush=True)

    signal.signal(signal.SIGUSR1, arm)
    life.watch_journal()
    life.watch_calls()
    return app.serve(Settings(**order["settings"]))


def main() -> None:
    """Bring up one child after the other."""
    import_module("support.prepared")
    sys.stdout = os.fdopen(1, "w", closefd=False)  # buffered, whatever the environment says: a kill must not cut a line
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(live(json.loads(line)))
        print(f"born {child}", flush=True)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
