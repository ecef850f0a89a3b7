"""Is an answer one that the version it claims would give? Pure: answers and what is known in, a verdict out.

    right      all of it is the greedy answer of a version with its label, which the engine could have been serving
    spanning   the engine says that an update cut it in two, and where. Its first part begins the older version's
               answer. What follows are `claims`: each part is to be what its version says after the parts before it,
               and a clean engine is asked whether it is
    wrong      anything else

vLLM tells no versions. An answer of one that is no version's in whole is spanning where it begins as a version's: what
follows the longest such beginning is a claim.

An engine cannot go back: `floor` is what it was known to serve when the question was sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chaos.book import AT_START, Book, Published
from chaos.plan import VLLM
from refitd_client.contract.naming import Order

Tokens = tuple[int, ...]
Expected = Callable[[str, int], Tokens]  # the greedy answer of a model to a prompt (by number)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) are said to come from weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete greedy answer. `sent` and `received` are monotonic seconds, `retractions` what the engine counted."""

    engine: str
    prompt: int
    tokens: Tokens
    label: str
    spans: tuple[Span, ...]
    retractions: int
    floor: Order
    sent: float
    received: float


@dataclass(frozen=True, slots=True)
class Right:
    """It is this version's answer."""

    version: Published


@dataclass(frozen=True, slots=True)
class Claim:
    """One of `models`, asked the prompt with `before` behind it, goes on with `tokens`."""

    models: tuple[str, ...]
    prompt: int
    before: Tokens
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Spanning:
    """It is known as coming from several versions."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Wrong:
    """No published version accounts for it."""

    reason: str


Verdict = Right | Spanning | Wrong


def judge(answer: Answer, book: Book, expected: Expected) -> Verdict:
    """Decide about one answer."""
    if answer.engine == VLLM:
        return _judge_unlabelled(answer, book, expected)
    if not _is_cut_cleanly(answer):
        return Wrong(f"its parts {answer.spans} do not make up {len(answer.tokens)} tokens labelled {answer.label!r}")
    if len(answer.spans) == 1:
        return _judge_whole(answer, book, expected)
    if answer.retractions == 0:
        return Wrong("it claims to span two versions, and was never held by an update")
    return _judge_parts(answer, book, expected)


def _judge_unlabelled(answer: Answer, book: Book, expected: Expected) -> Verdict:
    able = [each for each in (AT_START, *sorted(book.versions)) if each.order >= answer.floor]
    first = max(able, key=lambda version: (_common(answer, version, expected), version.order))
    end = _common(answer, first, expected)
    if end == len(answer.tokens):
        return Right(first)
    if end == 0:
        return Wrong(f"it begins as no answer of a version{_looks_like(answer, book, expected)}")
    models = tuple(dict.fromkeys(version.model for version in able))
    return Spanning((Claim(models, answer.prompt, answer.tokens[:end], answer.tokens[end:]),))


def _is_cut_cleanly(answer: Answer) -> bool:
    ends = [0, *(span.end for span in answer.spans)]
    starts = [*(span.start for span in answer.spans), len(answer.tokens)]
    return ends == starts and bool(answer.spans) and answer.spans[-1].label == answer.label


def _judge_whole(answer: Answer, book: Book, expected: Expected) -> Verdict:
    for version in _able(answer, answer.label, book):
        if expected(version.model, answer.prompt) == answer.tokens:
            return Right(version)
    return Wrong(f"it is no answer of a version labelled {answer.label!r}{_looks_like(answer, book, expected)}")


def _judge_parts(answer: Answer, book: Book, expected: Expected) -> Verdict:
    first, *later = answer.spans
    begins = [expected(version.model, answer.prompt) for version in _able(answer, first.label, book)]
    if not any(whole[: first.end] == answer.tokens[: first.end] for whole in begins):
        return Wrong(f"its first {first.end} tokens are no beginning of an answer of version {first.label!r}")
    claims = [_claim(answer, span, _able(answer, span.label, book)) for span in later]
    if unknown := [span.label for span, claim in zip(later, claims, strict=True) if not claim.models]:
        return Wrong(f"it claims to come from {unknown}, which the engine cannot have served")
    return Spanning(tuple(claims))


def _claim(answer: Answer, span: Span, versions: Sequence[Published]) -> Claim:
    models = tuple(version.model for version in versions)
    return Claim(models, answer.prompt, answer.tokens[: span.start], answer.tokens[span.start : span.end])


def _able(answer: Answer, label: str, book: Book) -> list[Published]:
    return [version for version in book.labelled(label) if version.order >= answer.floor]


def _looks_like(answer: Answer, book: Book, expected: Expected) -> str:
    """For whoever has to find out: whose answer begins most like it."""

    every = [*book.labelled("default"), *sorted(book.versions)]
    best = max(every, key=lambda version: (_common(answer, version, expected), version.order))
    begins = f"its first {_common(answer, best, expected)} tokens are those of {best.name} ({best.model})"
    return f"; {begins}; held {answer.retractions} times; floor {answer.floor}"


def _common(answer: Answer, version: Published, expected: Expected) -> int:
    """With how many tokens of a version's answer it begins."""
    pairs = zip(expected(version.model, answer.prompt), answer.tokens, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(answer.tokens))
