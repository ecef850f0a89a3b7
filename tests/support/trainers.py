"""Programs in the environment of the released trainers (`make trainers`): the examples, and what drives their parts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from .servers import TRAINERS_VENV

TREE = Path(__file__).resolve().parents[2]
EXAMPLES = TREE / "examples"
PROGRAMS = TREE / "tests/trainers"


def run_there(program: Path, *args: object, **variables: str) -> str:
    """Run a program, a shell's or Python's, with refitd importable; what it printed."""
    venv = Path(TRAINERS_VENV or "").absolute()
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    paths = {"PATH": f"{venv / 'bin'}:{kept['PATH']}", "PYTHONPATH": f"{TREE / 'client'}:{TREE / 'service'}"}
    words = ["sh"] if program.suffix == ".sh" else [str(venv / "bin/python"), "-W", "ignore"]
    command = [*words, str(program), *map(str, args)]
    # Ray runs its workers at nice 15: beside other tests they would get next to nothing of the processors.
    environment = kept | paths | {"RAY_worker_niceness": "0"} | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def report_of(said: str) -> dict[str, Any]:
    """The document that a program printed behind the word REPORT."""
    (found,) = [line.removeprefix("REPORT ") for line in said.splitlines() if line.startswith("REPORT ")]
    return json.loads(found)


def lines_of(said: str) -> list[dict[str, Any]]:
    """The documents that a program printed, one a line, among what libraries print."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]
