"""What a run comes to: answers judged, everything looked at, and the figures of the report."""

from collections import Counter

import httpx

from chaos import audit
from chaos.answers import judge
from chaos.report import Report
from chaos.stack import Stack
from chaos.tally import Tally
from refitd_client.errors import ServiceError

ANSWERS = 1000  # that a run of the usual length has to check
USUAL_ROUNDS = 200


def summary(stack: Stack, tally: Tally, *, seed: int, rounds: int, mid_load: int) -> Report:
    """End the load, look at everything, and say what was found. `rounds` and `mid_load` are what was wanted."""
    report = Report()
    report.add("seed", str(seed))
    report.add("engines", ", ".join(stack.engines))
    _report_rounds(report, stack, tally, mid_load)
    _report_answers(report, stack, tally, rounds)
    _report_rest(report, stack)
    return report


def _report_rounds(report: Report, stack: Stack, tally: Tally, mid_load: int) -> None:
    report.add("rounds that killed", len(tally.outcomes))
    for victim in sorted({str(outcome.round.victim) for outcome in tally.outcomes}):
        report.add(f"  the {victim}", sum(str(outcome.round.victim) == victim for outcome in tally.outcomes))
    report.at_least("  in mid-load of a real SGLang", tally.in_mid_load, mid_load)
    report.none_of("rounds that did not end in sync", [str(outcome) for outcome in tally.failed])
    report.add("versions published", len(stack.book.versions))
    report.counts("  what trainers heard:", _heard(stack))


def _report_answers(report: Report, stack: Stack, tally: Tally, count: int) -> None:
    stack.load.stop()
    judge_all(stack, tally)
    for claim, answer in tally.claims:
        if not stack.reference.holds(claim):
            tally.is_wrong(answer, f"no clean engine goes on like that after {len(claim.before)} tokens: {claim}")
    report.at_least("answers checked", sum(tally.checked.values()), ANSWERS * min(count, USUAL_ROUNDS) // USUAL_ROUNDS)
    report.counts("  by", tally.checked)
    report.counts("  ", tally.answers)
    for asked in stack.load.asked.values():
        report.counts(f"  {asked.name}, no answer:", asked.without_answer)
    report.none_of("wrong answers", tally.wrong)


def _report_rest(report: Report, stack: Stack) -> None:
    try:
        plan = audit.reclaim(stack)
        report.none_of("versions lost", audit.lost(stack))
        report.none_of("versions leaked", audit.leaked(stack.root, plan, stack.book))
        report.none_of("healthy engines left paused", audit.left_paused(stack))
    except (ServiceError, httpx.HTTPError) as error:
        report.none_of("looks at the end that failed", [str(error)])


def _heard(stack: Stack) -> Counter[str]:
    """How trainers' waits ended."""
    return Counter(outcome.partition(":")[0] for outcome in stack.trainer.outcomes())


def judge_all(stack: Stack, tally: Tally) -> list[str]:
    """Judge what was answered since the last time; sentences about what is wrong."""
    stack.reread()
    verdicts = [(answer, judge(answer, stack.book, stack.reference.expected)) for answer in stack.load.take()]
    return [said for answer, verdict in verdicts if (said := tally.judged(answer, verdict)) is not None]
