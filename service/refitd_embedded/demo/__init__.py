"""A real, small reinforcement-learning run on this machine's CPU: `refitd demo`.

A policy of 400,000 parameters learns to count on in strides. Its rollouts come from two embedded engines
over HTTP and from nowhere else; after each gradient step the weights are published, and the sidecar brings them to
the engines. Trainer and engines share no memory: what the engines say about their samples is held against what the
trainer computes with the version that they claim to serve.

    trainer ── publish ──▶ root ──▶ refitd ── reload ──▶ engine a, engine b
       ▲                                                        │
       └────────────── answers, log-probabilities ──────────────┘

`task` is what is learnt, `policy` the model, `trainer` the loss; `rollouts` asks the engines, `agreement` checks what
they say; `processes` starts and stops everything; `loop` is the run, `report` and `table` what is told of it.

Importing this package imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path

STEPS = 40
"""Gradient steps after which most answers are right."""


def main(
    *,
    steps: int = STEPS,
    seed: int = 0,
    publish: bool = True,
    json: bool = False,
    workdir: Path | None = None,
    service_url: str | None = None,
    engines: Sequence[str] = (),
    root: Path | None = None,
    model: Path | None = None,
    then: str | None = None,
) -> int:
    """Run the demo and print how it goes; the exit status.

    Args:
        steps: gradient steps.
        seed: of the first weights, the task and the sampling.
        publish: whether the weights of each step are published. Without, the engines' reward must not climb.
        json: print a line of JSON for each step and a summary, instead of a table.
        workdir: a folder without a run in it, to work in and to keep; else a temporary one.
        service_url: the running service to use, instead of starting one; with `engines` and `root`.
        engines: URLs of that service's engines.
        root: the folder that the service watches.
        model: the checkpoint to begin with, which the engines were started on; else one is made.
        then: the last line that is printed; else what to try next on this machine.

    Returns:
        0 if what was promised happened: the reward climbed with publishing, or did not climb without. 1 if not, or
        if an engine's log-probabilities are not those of the version that it claims. 2 if the run was not possible.
        130 after Ctrl-C. SIGTERM and SIGHUP raise SystemExit(143) and (129), once everything is stopped.
    """
    from refitd_embedded.demo.run import Options, run

    options = Options(
        steps=steps,
        seed=seed,
        publish=publish,
        json=json,
        workdir=workdir,
        service_url=service_url,
        engines=tuple(engines),
        root=root,
        model=model,
        then=then,
    )
    return run(options)
