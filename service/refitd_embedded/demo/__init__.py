"""A real, small reinforcement-learning run on this machine's CPU: `refitd demo`.

A policy of 400,000 parameters learns to count on in strides. Its rollouts come from two embedded engines, over HTTP
and from nowhere else; after each gradient step the weights are published, and the sidecar brings them
to the engines. Trainer and engines share no memory: what the engines say about their samples is held against what the
trainer computes with the version that they claim to serve.

    trainer ── publish ──▶ root ──▶ refitd ── reload ──▶ engine a, engine b
       ▲                                                        │
       └────────────── answers, log-probabilities ──────────────┘

`policy` is the model, what it learns and the loss; `rollouts` asks the engines and checks what they say; `processes`
starts and stops everything; `run` is the run, in which an engine is killed and a NaN is published; `table` is what is
printed of it.

Importing this package imports no torch.
"""

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

STEPS = 30
"""Gradient steps after which most answers are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How a run is made.

    Attributes:
        steps: gradient steps.
        seed: of the first weights, the task and the sampling.
        publish: whether the weights of each step are published. Without, the engines' reward must not climb.
        json: print a line of JSON for each step and a summary, instead of a table.
        plain: print lines and draw nothing again, also on a terminal.
        workdir: a folder without a run in it, to work in and to keep; else a temporary one.
        service_url: the running service to use, instead of starting one; with `engines` and `root`.
        engines: URLs of that service's engines.
        root: the folder that the service watches.
        model: the checkpoint to begin with, which the engines were started on; else one is made.
        stay: at the end, leave engines and service running until Ctrl-C.
        then: the last line that is printed; else what to try next on this machine.
    """

    steps: int = STEPS
    seed: int = 0
    publish: bool = True
    json: bool = False
    plain: bool = False
    workdir: Path | None = None
    service_url: str | None = None
    engines: tuple[str, ...] = ()
    root: Path | None = None
    model: Path | None = None
    stay: bool = False
    then: str | None = None

    def check(self) -> None:
        """Raise ValueError for options that make no run."""
        attached = [bool(self.service_url), bool(self.engines), self.root is not None]
        if any(attached) and not all(attached):
            raise ValueError("--service-url, --engines and --root belong together: give all three, or none")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}: take at least one")
        if self.workdir is not None and (self.workdir / "root").exists():
            raise ValueError(f"{self.workdir} holds an earlier run: choose another --workdir, or delete it")

    def preparation(self) -> str:
        """What happens before the first row, in one line: it takes seconds in which nothing else is printed."""
        if self.service_url is not None:
            return f"refitd demo: loading the trainer, then asking the engines of {self.service_url} for rollouts …"
        made = "loading" if self.model is not None else "making"
        return f"refitd demo: {made} a small model, then starting two engines and the service on this machine …"


def main(options: DemoOptions) -> int:
    """Run the demo and print how it goes; the exit status. Progress and errors go to stderr, the rest to stdout.

    Returns:
        0 if what was promised happened: the reward climbed with publishing, or did not climb without; an engine that
        the demo killed came back to the current step, and no engine loaded the NaN that it published. 1 if not, or
        if an engine's log-probabilities are not those of the version that it claims. 2 if the run was not possible.
        130 after Ctrl-C. SIGTERM and SIGHUP raise SystemExit(143) and (129), once everything is stopped.
    """
    try:
        options.check()
    except ValueError as problem:
        print(f"refitd demo: {problem}", file=sys.stderr)
        return 2
    from refitd_embedded.demo.processes import on_stderr

    # Before torch is imported, which takes seconds of its own.
    print(options.preparation(), file=sys.stderr, flush=True)
    with on_stderr("environment") as ready:
        from refitd_embedded.demo.run import run

        ready(f"Python {platform.python_version()}, torch {version('torch')}")
    return run(options)
