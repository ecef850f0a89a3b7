"""`make bench`: measures what was promised, prints a table, writes JSON; exit status 1 when a promise is missed.

    python tests/bench/main.py [--only NAME …] [--engines N] [--out FILE] [--folder DIR]

Everything runs in one go on one machine, on real processes; DIR (default: a new temporary folder) decides which disk.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from figures import Figure, report
from fleet import ENGINES, fleet
from footprint import footprint
from host_reports import host_reports
from latency import notice, watch
from many_tensors import many_tensors
from publish import publish
from rich.console import Console
from rich.table import Table
from update import update

from takeover import takeover

SCENARIOS: dict[str, Callable[[Path], list[Figure]]] = {
    "notice": notice,
    "watch": watch,
    "update": update,
    "publish": publish,
    "tensors": many_tensors,
    "fleet": fleet,
    "footprint": footprint,
    "takeover": takeover,
    "host-reports": host_reports,
}
# takeover needs PostgreSQL, and host-reports takes minutes
BY_NAME = ("takeover", "host-reports")


def main() -> int:
    """Run the scenarios."""
    usual = [name for name in SCENARIOS if name not in BY_NAME]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=usual, help="scenarios to run")
    parser.add_argument("--engines", type=int, default=ENGINES, help="of the fleet")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--folder", type=Path, help="folder to work in")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=arguments.folder) as folder:
        for name in arguments.only:
            console.print(f"{name} …")
            (Path(folder) / name).mkdir()
            mine = Path(folder) / name
            figures += fleet(mine, arguments.engines) if name == "fleet" else SCENARIOS[name](mine)
    _show(figures)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        command = f"make bench ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"
        arguments.out.write_text(json.dumps(report(figures, command), indent=1) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


def _show(figures: list[Figure]) -> None:
    table = Table("figure", "measured", "limit", "", box=None)
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.measured:g} {figure.unit}",
            f"≤ {figure.limit:.4g}",
            "met" if figure.met else "MISSED",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
