"""What is counted during a run, and whether it is good: pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.answers import Answer, Claim, Right, Spanning, Verdict, Wrong
from chaos.book import AT_START
from chaos.plan import VLLM
from chaos.rounds import Outcome


@dataclass(slots=True)
class Tally:
    """Counts so far. `wrong` are sentences, `claims` what a clean engine has to confirm, with who claimed it."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    answers: Counter[str] = field(default_factory=Counter[str])
    checked: Counter[str] = field(default_factory=Counter[str])
    claims: list[tuple[Claim, Answer]] = field(default_factory=list[tuple[Claim, Answer]])
    wrong: list[str] = field(default_factory=list[str])

    def judged(self, answer: Answer, verdict: Verdict) -> str | None:
        """Count an answer; a sentence if it is wrong."""
        self.checked[answer.engine] += 1
        match verdict:
            case Right(version):
                self.answers["of start-up weights" if version == AT_START else "of one version"] += 1
            case Spanning(claims):
                self.answers["spanning, untold" if answer.engine == VLLM else "known as spanning"] += 1
                self.claims += [(claim, answer) for claim in claims]
            case Wrong(reason):
                return self.is_wrong(answer, reason)
        return None

    def is_wrong(self, answer: Answer, reason: str) -> str:
        """Count a wrong one; return the sentence."""
        spans = ", ".join(f"{span.label!r}[{span.start}:{span.end}]" for span in answer.spans)
        self.wrong.append(
            f"WRONG {answer.engine} to prompt {answer.prompt} as {spans}: {list(answer.tokens)}: {reason} "
            f"(sent {answer.sent:.3f}, received {answer.received:.3f})"
        )
        return self.wrong[-1]

    @property
    def in_mid_load(self) -> int:
        """Rounds that killed while the real SGLang's own log said that it was loading."""
        return sum(outcome.in_mid_load for outcome in self.outcomes)

    @property
    def failed(self) -> Sequence[Outcome]:
        """Rounds that did not end in sync."""
        return [outcome for outcome in self.outcomes if outcome.failure is not None]
