"""The `refitd` command. The SDK is installed without what the command needs: then it says so in one line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_EMBEDDED = frozenset({"torch"})


def main() -> None:
    """Run the command line and exit."""
    try:
        if sys.argv[1:2] == ["status"]:
            answer_status(sys.argv[2:])
        from refitd.cli.app import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("refitd") or not package:
            raise
        extra = "embedded" if package in _EMBEDDED else "service"
        print(f"refitd: the module {package} is missing: pip install '.[{extra}]' in its clone", file=sys.stderr)
        sys.exit(2)


def answer_status(words: Sequence[str]) -> None:
    """Answer `refitd status` and exit, without Typer and pydantic: to import them takes as long as all the rest.

    Returns where the words are not plainly its options: then Typer reads them, and says what is wrong.
    """
    from refitd.cli.output import connect, speaking
    from refitd.cli.status import MOST_VERSIONS, VERSIONS, show_status

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--url")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--limit", type=int, default=VERSIONS, choices=range(1, MOST_VERSIONS + 1))
    try:
        given, others = parser.parse_known_args(words)
    except argparse.ArgumentError:
        return
    if others:
        return
    try:
        with speaking(json=given.json) as out, connect(given.url, given.token_file) as client:
            show_status(out, client, given.limit)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
