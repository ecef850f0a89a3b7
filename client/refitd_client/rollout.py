"""Which version generated which tokens of an answer, and how stale they were when a trainer used them.

>>> for span in spans(answer, run="grpo-7b"):
...     print(span.step, answer["output_ids"][span.start : span.end])

The engine says it: refitd gives it each version's step and generation as label (`weight_version`), and the engine notes
at which token the label changed. Nothing is asked of the service.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from refitd_client.contract.naming import parse_version_label, version_id
from refitd_client.errors import UnlabelledAnswerError

_LACKS = (
    "SGLang says it from 0.5.19 on, in /generate, /v1/completions and /v1/chat/completions; vLLM 0.32 in "
    "/inference/v1/generate alone, which takes vllm serve --enable-scale-out"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens of an answer that one version generated: `answer[start:end]`, counted from the first generated token.

    `label` is what the engine calls the version. `step` is the trainer's step and `generation` the run's, both None
    where the engine was not on a version of refitd's: on the model that it was started with, or on what another program
    has loaded. `version` is the version's id, None without a step or where the run was not named.
    """

    label: str
    step: int | None
    generation: int | None
    run: str | None
    version: str | None
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


def spans(answer: Mapping[str, Any], run: str | None = None) -> list[TokenSpan]:
    """Which version generated which tokens of an answer, in order; together they are all of its tokens.

    Args:
        answer: an answer as JSON. Of SGLang: that of /generate, /v1/completions or /v1/chat/completions. Of vLLM: that
            of /inference/v1/generate; of several choices, one of its `choices`. Of a stream: the last event.
        run: the run that the engine follows. An engine does not know it.

    Raises:
        UnlabelledAnswerError: the answer does not say it.
    """
    found = _told(answer)
    if not isinstance(found, list) or not found:
        raise UnlabelledAnswerError(f"the answer does not say which weights generated which tokens: {_LACKS}")
    read = [_span(each, run) for each in cast("list[Any]", found)]
    ends = [0, *(span.end for span in read)]
    if any(span.start != before or span.end < span.start for span, before in zip(read, ends, strict=False)):
        raise UnlabelledAnswerError(f"the answer's spans do not follow each other: {found!r}")
    return read


@dataclass(slots=True)
class TokenCounts:
    """Counts tokens of rollouts, for a trainer's own metrics. Only the reader of the answers can count them.

    `by_step` counts by the step of the version that generated the tokens, `by_staleness` by how many steps the trainer
    was ahead of that version when it used them. Tokens of no version are counted under None. So is the staleness of
    tokens of another generation: its steps are not steps towards this one's.
    """

    by_step: Counter[int | None] = field(default_factory=Counter[int | None])
    by_staleness: Counter[int | None] = field(default_factory=Counter[int | None])

    def add(self, found: Iterable[TokenSpan], step: int, generation: int = 1) -> None:
        """Count an answer.

        Args:
            found: its spans.
            step: the newest step that the trainer had published when it used the answer.
            generation: the run's at that step, as `Publication.generation` has it.
        """
        for span in found:
            self.by_step[span.step] += span.tokens
            ahead = None if span.step is None or span.generation != generation else step - span.step
            self.by_staleness[ahead] += span.tokens


def _told(answer: Mapping[str, Any]) -> Any:
    choices = cast("list[Any]", answer.get("choices") or [])
    if len(choices) > 1:
        text = "the answer has several choices: pass each of answer['choices'] by itself, or ask for one (n=1)"
        raise UnlabelledAnswerError(text)
    nested: list[Any] = [answer, answer.get("meta_info"), answer.get("metadata"), *choices]
    holders = (cast("Mapping[str, Any]", each) for each in nested if isinstance(each, Mapping))
    return next((each["weight_versions"] for each in holders if each.get("weight_versions")), None)


def _span(told: Any, run: str | None) -> TokenSpan:
    try:
        label, start, end = str(told["version"]), int(told["start"]), int(told["end"])
    except (TypeError, KeyError, ValueError) as error:
        raise UnlabelledAnswerError(f"the answer's spans have another form: {told!r}") from error
    order = parse_version_label(label)
    if order is None:
        return TokenSpan(label=label, step=None, generation=None, run=run, version=None, start=start, end=end)
    version = None if run is None else version_id(run, order)
    return TokenSpan(
        label=label, step=order.step, generation=order.generation, run=run, version=version, start=start, end=end
    )
