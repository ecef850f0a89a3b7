"""`make bench-gpu`: the whole way from a trainer's GPU to an engine's answer, and what else moves weights there.

    python tests/bench/gpu/main.py --engine URL --engine-model DIR [--only loop peers]
        [--out FILE] [--folder DIR] [--device N]

URL is of a running SGLang that was started with the model in DIR. The folder is on a tmpfs, /dev/shm by default. Exit
status 1 when a limit is missed.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from loop import loop
from machine import machine
from peers import peers
from rows import Row
from setting import Setting

SCENARIOS: dict[str, Callable[[Setting], list[Row]]] = {"loop": loop, "peers": peers}
"""`peers` comes last: it may leave the engine with a broken group."""


def main() -> int:
    """Run the scenarios."""
    arguments = _arguments()
    torch.cuda.set_device(arguments.device)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=arguments.folder) as folder:
        setting = Setting(Path(folder), arguments.rounds, arguments.engine, arguments.engine_model)
        for name in arguments.only:
            rows += _shown(SCENARIOS[name](setting))
            _write(arguments.out, rows)
    return 0 if all(row.limit is None or row.p50 <= row.limit for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--engine", required=True, help="URL of a running SGLang")
    parser.add_argument("--engine-model", type=Path, required=True, help="folder of the model that it was started with")
    parser.add_argument("--device", type=int, default=0, help="the trainer's GPU; the engine has the first one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")  # noqa: S108
    return parser.parse_args()


def _write(out: Path | None, rows: list[Row]) -> None:
    """After each scenario: a run that is cut off leaves what it had."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    command = f"make bench-gpu ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"
    out.write_text(
        json.dumps({"command": command} | machine() | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )


def _shown(rows: list[Row]) -> list[Row]:
    for row in rows:
        limit = "" if row.limit is None else f"≤ {row.limit:g} {'met' if row.p50 <= row.limit else 'MISSED'}"
        stages = " ".join(f"{name} {value:g}" for name, value in row.stages.items())
        spread = f"{row.p50:>9g} {row.unit:<2} [{row.min:g}, {row.max:g}] n={row.n}" if row.n else ""
        line = f"{row.model:<5}{row.name:<46}{spread:<38}{limit:<18}{row.note}{stages}"
        sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.flush()
    return rows


if __name__ == "__main__":
    sys.exit(main())
