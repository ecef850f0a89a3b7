"""`refitd demo`: trainer, service and engines on one machine, without a GPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from refitd_embedded.demo import STEPS, DemoOptions, main

Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Gradient steps to take")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed takes the same steps")]
Publish = Annotated[bool, typer.Option("--publish/--no-publish", help="Publish each step, or keep it from the engines")]
Workdir = Annotated[
    Path | None, typer.Option("--workdir", metavar="DIR", help="Where to work; else a temporary folder")
]
Plain = Annotated[bool, typer.Option("--plain", help="No bars and colours, also on a terminal")]
Stay = Annotated[bool, typer.Option("--stay", help="Leave engines and service running at the end, until Ctrl-C")]
Lines = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each step, and a summary")]


def demo(
    steps: Steps = STEPS,
    seed: Seed = 0,
    publish: Publish = True,
    workdir: Workdir = None,
    plain: Plain = False,
    stay: Stay = False,
    json: Lines = False,
) -> None:
    """Watch two engines follow a trainer that really learns, on this machine's CPU, with everything between them real.

    In between an engine is killed, and weights with a NaN are published; then the run is rolled back. The end says how
    each ended.

    The rollouts that it learns from come from the engines alone. With --no-publish they stay on the weights that they
    began with, and the reward must not climb: that is what refitd is for. With --stay the dashboard outlives the end.

    \b
    refitd demo
    refitd demo --steps 10 --seed 7 --json
    refitd demo --no-publish
    """
    if find_spec("torch") is None:  # said before the demo starts processes that would each find out
        raise ModuleNotFoundError("the demo trains with torch", name="torch")
    options = DemoOptions(steps=steps, seed=seed, publish=publish, workdir=workdir, plain=plain, stay=stay, json=json)
    raise typer.Exit(main(options))
