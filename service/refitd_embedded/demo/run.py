"""The demo from its options to its exit status: everything is started, watched and stopped here."""

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from refitd_client import RefitError, WeightPublisher
from refitd_embedded.demo import DemoOptions, policy
from refitd_embedded.demo.agreement import DisagreementError
from refitd_embedded.demo.loop import Releases, rows
from refitd_embedded.demo.processes import ProcessError, Stack, own_stack
from refitd_embedded.demo.report import Row, Summary, summarise
from refitd_embedded.demo.rollouts import Engines, RolloutError
from refitd_embedded.demo.table import display
from refitd_embedded.demo.trainer import Trainer
from refitd_embedded.weights import CheckpointError, load

RUN = "demo"


def run(options: DemoOptions) -> int:
    """Run it; the exit status."""
    began = time.monotonic()
    # The engines sit beside the trainer, on the same few cores; and more threads would round differently.
    torch.set_num_threads(1)
    try:
        with ending_on_signals(), _workdir(options) as workdir:
            summary = _run(options, workdir, began)
    except DisagreementError as problem:
        return _fail(str(problem), 1)
    except (RefitError, RolloutError, ProcessError, CheckpointError, OSError, ValueError) as problem:
        return _fail(str(problem), 2)
    except KeyboardInterrupt:
        return _fail("interrupted; everything is stopped", 130)
    return 0 if summary.as_promised else 1


def _run(options: DemoOptions, workdir: Path, began: float) -> Summary:
    model = options.model or policy.write(policy.fresh(options.seed), workdir / "base")
    trainer = Trainer(load(model))
    with _stack(options, workdir, model) as stack, display(as_json=options.json, then=options.then) as shown:
        with _publisher(options, stack, model) as publisher, Engines(stack.engines, stack.check) as engines:
            releases, seen = Releases(publisher, stack.check), list[Row]()
            try:
                for row in rows(trainer, stack, engines, releases, steps=options.steps, seed=options.seed):
                    seen.append(row)
                    shown.row(row)
            except (RefitError, RolloutError):
                stack.check()  # a child that died is the better explanation
                raise
        summary = summarise(
            seen, publishing=options.publish, versions=releases.counts(), seconds=time.monotonic() - began
        )
        shown.summary(summary)
    return summary


@contextmanager
def _workdir(options: DemoOptions) -> Generator[Path]:
    if options.workdir is not None:
        options.workdir.mkdir(parents=True, exist_ok=True)
        yield options.workdir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="refitd-demo-") as folder:
        yield Path(folder)


@contextmanager
def _stack(options: DemoOptions, workdir: Path, model: Path) -> Generator[Stack]:
    if options.service_url is None or options.root is None:
        with own_stack(workdir, model.absolute()) as stack:
            yield stack
    else:
        yield Stack(service_url=options.service_url, engines=options.engines, root=options.root)


def _publisher(options: DemoOptions, stack: Stack, model: Path) -> AbstractContextManager[WeightPublisher | None]:
    if not options.publish:
        return nullcontext()
    return WeightPublisher(stack.root, RUN, stack.service_url, base_model=model)


@contextmanager
def ending_on_signals() -> Generator[None]:
    """Have SIGTERM, and SIGHUP of a terminal that is closed, unwind the run as Ctrl-C does: children are stopped.

    A signal that is ignored stays so: `nohup` means that the run outlives its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number in (number for number, handler in before.items() if handler is not signal.SIG_IGN):
            signal.signal(number, _end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _fail(message: str, status: int) -> int:
    print(f"refitd demo: {message}", file=sys.stderr)
    return status
