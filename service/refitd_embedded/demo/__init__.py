"""A real, small reinforcement-learning run on this machine's CPU: `refitd demo`.

A policy of 400,000 parameters learns to count on in strides. Its rollouts come from two embedded engines, over HTTP
and from nowhere else; after each gradient step the weights are published, and the sidecar brings them to the engines.
Trainer and engines share no memory: the log-probabilities that engines report are held against those that the trainer
computes with the version that the engines claim to serve.

    trainer ── publish ──▶ root ──▶ refitd ── reload ──▶ engine a, engine b
       ▲                                                        │
       └────────────── answers, log-probabilities ──────────────┘

    policy      the model, what it learns, and the loss
    rollouts    asks the engines and checks their answers
    processes   starts and stops engines and service
    run         the run, in which an engine is killed, a NaN is published, and the run is rolled back
    table       what is printed of it

Importing this package imports no torch.
"""

import sys
from dataclasses import dataclass
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
        plain: print a table without bars and colours, also on a terminal.
        workdir: a folder without a run in it, to work in and to keep; else a temporary one.
        service_url: the running service to use, instead of starting one; with `engines` and `root`.
        engines: URLs of that service's engines.
        root: the folder that the service watches.
        model: the checkpoint to begin with, which the engines were started on; else one is made.
        stay: at the end, leave engines and service running until Ctrl-C.
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

    def check(self) -> None:
        """Raise ValueError for options that make no run."""
        attached = [bool(self.service_url), bool(self.engines), self.root is not None]
        if any(attached) and not all(attached):
            raise ValueError("--service-url, --engines and --root belong together: give all three, or none")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}: take at least one")
        if self.workdir is not None and (self.workdir / "root").exists():
            raise ValueError(f"{self.workdir} holds an earlier run: choose another --workdir, or delete it")


def main(options: DemoOptions) -> int:
    """Run the demo and print how it goes; the exit status. Progress and errors go to stderr, the rest to stdout.

    Returns:
        0 if all promises held: the reward climbed with publishing, or did not climb without; an engine that the demo
        killed came back to the current step, no engine loaded the NaN that it published, and a rollback was served. 1
        if not, or if an engine's log-probabilities are not those of the version that it claims. 2 if the run was not
        possible. 130 after Ctrl-C. SIGTERM and SIGHUP raise SystemExit(143) and (129), once everything is stopped.
    """
    try:
        options.check()
    except ValueError as problem:
        print(f"refitd demo: {problem}", file=sys.stderr)
        return 2
    engines = "two engines on this machine" if options.service_url is None else f"engines of {options.service_url}"
    # Before torch is imported, which takes seconds.
    print(f"refitd demo: a small model will learn from rollouts of {engines} …", file=sys.stderr, flush=True)
    from refitd_embedded.demo.run import run

    return run(options)
