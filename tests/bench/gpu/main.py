"""`make bench-gpu`: what else moves weights from a trainer's GPU to an engine.

    python tests/bench/gpu/main.py --engine URL --engine-model DIR [--out FILE] [--folder DIR] [--device N]

URL is of a running SGLang that was started with the model in DIR. The folder is on a tmpfs, /dev/shm by default.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from machine import machine
from peers import peers
from setting import Setting


def main() -> None:
    """Measure each of them."""
    arguments = _arguments()
    torch.cuda.set_device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="refitd-bench-", dir=arguments.folder) as folder:
        rows = peers(Setting(Path(folder), arguments.rounds, arguments.engine, arguments.engine_model))
    for row in rows:
        spread = f"{row.p50:>9g} ms [{row.min:g}, {row.max:g}] n={row.n}" if row.n else ""
        sys.stdout.write(f"{row.model:<5}{row.name:<46}{spread:<38}{row.note}".rstrip() + "\n")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        command = f"make bench-gpu ARGS={shlex.quote(shlex.join(sys.argv[1:]))}"
        document = {"command": command} | machine() | {"rows": [asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="URL of a running SGLang")
    parser.add_argument("--engine-model", type=Path, required=True, help="folder of the model that it was started with")
    parser.add_argument("--device", type=int, default=0, help="the trainer's GPU; the engine has the first one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")  # noqa: S108
    return parser.parse_args()


if __name__ == "__main__":
    main()
