"""A trainer's process: publishes what its standard input names, and says how far it is. Made to be killed.

    in    {"step": 17, "path": "/models/m3", "model": "m3"}
    out   {"at": "begin"} {"at": "published", "generation": 1} {"at": "waited", "outcome": "served"}

Which model it is goes into the manifest's metadata, so that a version is known whose publisher died before it spoke.
"""

import json
import sys
from pathlib import Path
from typing import Any

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.errors import RefitError

WAIT_SECONDS = 300.0


def say(at: str, **more: Any) -> None:
    """One line for who started it."""
    print(json.dumps({"at": at, **more}), flush=True)


def publish(publisher: WeightPublisher, step: int, path: str, model: str) -> None:
    """Publish one step and wait until it is served."""
    say("begin", step=step)
    done = publisher.publish(path, step=step, metadata={"model": model})
    say("published", step=step, generation=done.generation, noticed=done.notice_error is None)
    try:
        outcome = str(done.wait(timeout=WAIT_SECONDS).outcome)
    except RefitError as error:
        outcome = f"{type(error).__name__}: {error}"
    say("waited", step=step, outcome=outcome)


def main() -> None:
    """Publish until the input ends."""
    root, run, url, token_file = sys.argv[1:]
    with WeightPublisher(Path(root), run, url, options=PublishOptions(token_file=token_file)) as publisher:
        say("ready")
        for line in sys.stdin:
            publish(publisher, **json.loads(line))


if __name__ == "__main__":
    main()
