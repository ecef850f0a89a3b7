"""One prompt on its way to an answer: what was asked, and what has been generated so far.

A request belongs to the event loop: the scheduler's thread reads it while a step runs, but only the loop changes it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from refitd_embedded.lora import Adapter
from refitd_embedded.sampling import SamplingParams

Finish = dict[str, Any]
"""SGLang's `finish_reason`: `{"type": "stop" | "length" | "abort", …}`."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled from the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """`changed` is called on every change while `stream` is set, and at the end in any case.

    `ended_waiting`: aborted in the queue, where SGLang knows less of it.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    adapter: Adapter | None = None
    return_logprob: bool = False
    stream: bool = False
    output: list[int] = field(default_factory=list[int])
    output_logprobs: list[float] = field(default_factory=list[float])
    finish: Finish | None = None
    ended_waiting: bool = False
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    relabelled: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    retractions: int = 0
    born: float = field(default_factory=time.monotonic)
    lived: float | None = None
    changed: Callable[["GenerationRequest"], None] = lambda _request: None

    @property
    def length(self) -> int:
        """Tokens so far, prompt and answer."""
        return len(self.prompt) + len(self.output)

    def relabel(self, old: str) -> None:
        """From now on tokens come from other weights; those so far came from `old`."""
        if self.output:
            self.relabelled.append((old, len(self.output)))

    def end(self, reason: Finish, version: str) -> None:
        """Finish, under the weights labelled `version`."""
        self.finish = reason
        self.spans = spans([*self.relabelled, (version, len(self.output))], len(self.output))
        self.lived = time.monotonic() - self.born
        self.changed(self)


def spans(changes: list[tuple[str, int]], tokens: int) -> list[VersionSpan]:
    """Which tokens came from which version; `changes` are (version, number of tokens when it ended), in order.

    >>> spans([("7", 2), ("8", 5)], 5)
    [Span(version='7', start=0, end=2), Span(version='8', start=2, end=5)]
    """
    found: list[VersionSpan] = []
    for version, end in changes:
        start = found[-1].end if found else 0
        if found and min(end, tokens) <= start:
            continue
        if found and found[-1].version == version:
            found[-1] = VersionSpan(version, found[-1].start, min(end, tokens))
        else:
            found.append(VersionSpan(version, start, min(end, tokens)))
    return found


def finished(request: GenerationRequest, eos: frozenset[int]) -> Finish | None:
    """Whether the last token ends the answer, and why. A stop token counts before the length, and stays in."""
    params, output = request.params, request.output
    last = output[-1] if output else None
    if last is not None and not params.ignore_eos and (last in params.stop_token_ids or last in eos):
        return {"type": "stop", "matched": last}
    if params.max_new_tokens is not None and len(output) >= params.max_new_tokens:
        return {"type": "length", "length": params.max_new_tokens}
    return None


def aborted(*, ran: bool) -> Finish:
    """SGLang tells requests that were running from those that were waiting."""
    if ran:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return {"type": "abort", "message": "Abort in waiting queue"}
