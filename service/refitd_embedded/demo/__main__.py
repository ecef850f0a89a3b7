"""`python -m refitd_embedded.demo`: the demo, on processes of its own or on a stack that is running."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from refitd_embedded.demo import STEPS, DemoOptions, main

DESCRIPTION = """\
Train a small policy by policy gradient on this machine's CPU, as `refitd demo` does. With --service-url, --engines and
--root it is the trainer of a stack that is running; REFITD_TOKEN is the service's token."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m refitd_embedded.demo", description=DESCRIPTION)
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help="gradient steps (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of first weights, task and sampling (%(default)s)")
    add("--no-publish", dest="publish", action="store_false", help="keep the weights from the engines")
    add("--json", action="store_true", help="a line of JSON for each step, and a summary")
    add("--plain", action="store_true", help="no bars and colours, also on a terminal")
    add("--workdir", type=Path, metavar="DIR", help="where to work, kept afterwards (a temporary folder)")
    add("--service-url", metavar="URL", help="use this service, with --engines and --root")
    add("--engines", type=_urls, default=(), metavar="URL,URL", help="the engines of that service")
    add("--root", type=Path, metavar="DIR", help="the folder that the service watches")
    add("--model", type=Path, metavar="DIR", help="the checkpoint that the engines were started on")
    add("--stay", action="store_true", help="leave engines and service running at the end, until Ctrl-C")
    return parser.parse_args(words)


def _urls(text: str) -> tuple[str, ...]:
    return tuple(url.strip() for url in text.split(",") if url.strip())


if __name__ == "__main__":
    sys.exit(main(DemoOptions(**vars(arguments()))))
