"""A whole run: the stack, the rounds, the checks at the end, the report."""

import argparse
import json
import random
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console

from chaos import models
from chaos.plan import Round, another_mid_load, rounds
from chaos.report import Report
from chaos.rounds import Outcome, play
from chaos.stack import SGLANG, Begun, Stack
from chaos.start import running
from chaos.summary import USUAL_ROUNDS, judge_all, summary
from chaos.tally import Tally
from support.servers import SGLANG_VENV
from support.vllm import VLLM_VENV

WARM_UP_SECONDS = 120.0
WIDTH = 110  # characters
TAIL_EVENTS = 25
TAIL_BYTES = 6000


def main() -> int:
    """Run, print, and say by the exit status whether all is well."""
    arguments = _arguments()
    # A shell that runs this in the background has SIGINT ignored. SIGTERM, too, has to leave nothing behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="refitd-chaos-", dir=arguments.folder))
    try:
        report, outcomes = _run(arguments, folder, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; logs are in {folder}")
        return 130
    report.show(Console(width=WIDTH))
    if arguments.out is not None:
        command = shlex.join(["python", *sys.argv])
        document = report.document(command, [str(outcome) for outcome in outcomes])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if report.is_good:
        shutil.rmtree(folder)
    else:
        console.print(f"logs are in {folder}")
    return 0 if report.is_good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/reliability/chaos/main.py",
        description="Kills the real publisher, service and engines at random times, under load.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=USUAL_ROUNDS, help="rounds that kill (%(default)s)")
    add("--sglang-rounds", type=int, default=60, help="of them, in mid-load of a real SGLang (%(default)s)")
    add("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="what the rounds are drawn from")
    add("--out", type=Path, help="where to write the report as JSON")
    add("--folder", type=Path, help="folder to work in (default: a temporary one)")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, folder: Path, console: Console) -> tuple[Report, list[Outcome]]:
    began = time.monotonic()
    sglang = SGLANG if SGLANG_VENV else None
    faults: list[str] = []
    threading.excepthook = lambda fault: faults.append(
        f"{fault.exc_type.__name__}: {fault.exc_value} in {fault.thread}"
    )
    console.print(f"seed {arguments.seed}; logs in {folder}")
    if sglang is None:
        console.print("REFITD_SGLANG_VENV is not set: no real SGLang is among the engines")
    if not VLLM_VENV:
        console.print("REFITD_VLLM_VENV is not set: no real vLLM is among the engines")
    tally = Tally()
    with running(folder, models.make(folder / "models"), str(arguments.seed)) as stack:
        _warm_up(stack)
        console.print(f"everything runs after {time.monotonic() - began:.0f} s")
        plan = rounds(arguments.seed, arguments.rounds, arguments.sglang_rounds, list(stack.engines), sglang)
        wanted = min(arguments.sglang_rounds, arguments.rounds) if sglang else 0
        _play_all(stack, plan, tally, console)
        _make_up(stack, arguments.seed, len(plan), wanted, tally, console)
        report = summary(stack, tally, seed=arguments.seed, rounds=arguments.rounds, mid_load=wanted)
        report.add("minutes", round((time.monotonic() - began) / 60, 1))
    report.none_of("faults of this test itself", faults)
    return report, tally.outcomes


def _warm_up(stack: Stack) -> None:
    """The first version: from here on every engine has contents that are on record."""
    begun: Begun = stack.publish(random.Random("warm-up"))
    stack.published(begun, WARM_UP_SECONDS)
    if (reason := stack.converge(WARM_UP_SECONDS)) is not None:
        raise RuntimeError(f"the stack does not even start: {reason}\n{stack.refitd.tail()}")


def _play_all(stack: Stack, plan: list[Round], tally: Tally, console: Console) -> None:
    for round_ in plan:
        if not tally.failed:  # what a stuck fleet does next tells nothing new
            _play(stack, round_, tally, console)


def _make_up(stack: Stack, seed: int, played: int, wanted: int, tally: Tally, console: Console) -> None:
    """Rounds that missed the middle of a load are made up for, but not for ever."""
    for number in range(played + 1, played + 1 + wanted):
        if tally.in_mid_load >= wanted or tally.failed:
            return
        _play(stack, another_mid_load(seed, number, SGLANG), tally, console)


def _play(stack: Stack, round_: Round, tally: Tally, console: Console) -> None:
    outcome = play(stack, round_)
    tally.outcomes.append(outcome)
    _say(console, str(outcome))
    wrong = judge_all(stack, tally)
    for sentence in wrong:
        _say(console, sentence)
    if outcome.failure is not None or wrong:
        _say(console, _evidence(stack))


def _evidence(stack: Stack) -> str:
    """What the service did last."""
    events = [
        f"  {event.seq} {event.at} {event.subject}: {event.text}" for event in stack.follower.events[-TAIL_EVENTS:]
    ]
    log = stack.refitd.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    return "\n".join(["the last events:", *events, f"the end of {stack.refitd.log}:", log])


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
