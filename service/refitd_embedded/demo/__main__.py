"""`python -m refitd_embedded.demo`: the demo, on processes of its own or on a stack that is running."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refitd_embedded.demo import STEPS, DemoOptions, main

DESCRIPTION = """\
Train a small policy by policy gradient on this machine's CPU. Its rollouts come from two engines over HTTP, which
refitd keeps on the newest weights. Prints a table: reward, version served, staleness, publish and refit times, disk.
On a stack of its own it kills an engine and publishes a NaN, and says how both ended."""
EPILOG = """\
examples:
  python -m refitd_embedded.demo
      Start two engines and the service, run, stop them again.
  python -m refitd_embedded.demo --no-publish
      The same without publishing: the engines never improve.
  python -m refitd_embedded.demo --service-url http://refitd:8700 --engines http://a:30000,http://b:30000 --root /data
      Be the trainer of a stack that is running. REFITD_TOKEN is the service's token.

exit status: 0 if the reward climbed (with --no-publish: if it did not), 1 if not, 2 if the run was not possible."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m refitd_embedded.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help="gradient steps (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of first weights, task and sampling (%(default)s)")
    add("--no-publish", dest="publish", action="store_false", help="keep the weights from the engines")
    add("--json", action="store_true", help="a line of JSON for each step, and a summary")
    add("--plain", action="store_true", help="lines for a log, also on a terminal")
    add("--workdir", type=Path, metavar="DIR", help="where to work, kept afterwards (a temporary folder)")
    add("--service-url", metavar="URL", help="use this service, with --engines and --root")
    add("--engines", type=_urls, default=(), metavar="URL,URL", help="the engines of that service")
    add("--root", type=Path, metavar="DIR", help="the folder that the service watches")
    add("--model", type=Path, metavar="DIR", help="the checkpoint that the engines were started on")
    add("--stay", action="store_true", help="leave engines and service running at the end, until Ctrl-C")
    add("--then", metavar="TEXT", help="what to say at the end (what to try next on this machine)")
    return parser.parse_args(words)


def _urls(text: str) -> tuple[str, ...]:
    return tuple(url.strip() for url in text.split(",") if url.strip())


if __name__ == "__main__":
    sys.exit(main(DemoOptions(**vars(arguments()))))
