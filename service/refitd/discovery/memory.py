"""Which engines there are, by what places have said over time. Pure: what is remembered and what is said now in, out.

A place that does not answer, or that suddenly names nobody, is more often broken than right. So an engine that was
named once stays until every place has answered, somebody was named, and it has been missing for `GONE_SECONDS`. Any
fault on the way takes no engine away, and is said as long as it lasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

GONE_SECONDS = 60.0
MOST = 1000  # engines: a place that names more is not believed


@dataclass(frozen=True, slots=True)
class Named:
    """What a place says: the URLs of engines. `place` is for sentences."""

    place: str
    urls: frozenset[str]


@dataclass(frozen=True, slots=True)
class Silent:
    """A place that could not be asked, or said something that cannot be used."""

    place: str
    reason: str


Answer = Named | Silent


@dataclass(frozen=True, slots=True)
class Memory:
    """The engines by URL, with the time (monotonic seconds) since which nobody has named them; None while one does.

    `fault` is why nobody may be let go of now, None where nothing is wrong.
    """

    missing_since: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    fault: str | None = None


def remember(memory: Memory, answers: Sequence[Answer], now: float) -> Memory:
    """Take what all places say now."""
    answers = [_believed(answer) for answer in answers]
    named = frozenset[str]().union(*(answer.urls for answer in answers if isinstance(answer, Named)))
    fault = _fault(answers, named, memory)
    after: dict[str, float | None] = dict.fromkeys(sorted(named))
    for url, since in memory.missing_since.items():
        if url in named:
            continue
        if fault is not None:
            after[url] = since  # nobody can say for how long it has been missing
        elif since is None or now - since < GONE_SECONDS:
            after[url] = now if since is None else since
    return Memory(after, fault)


def _believed(answer: Answer) -> Answer:
    if isinstance(answer, Named) and len(answer.urls) > MOST:
        return Silent(answer.place, f"it names {len(answer.urls)} engines, and at most {MOST} are believed")
    return answer


def _fault(answers: Sequence[Answer], named: frozenset[str], memory: Memory) -> str | None:
    silent = [f"{answer.place}: {answer.reason}" for answer in answers if isinstance(answer, Silent)]
    kept = f"{len(memory.missing_since)} engines that were found before stay" if memory.missing_since else None
    if not silent and not named and kept is not None:
        silent = [f"{answer.place} names no engine" for answer in answers]
    if not silent:
        return None
    return "engines cannot be found: " + "; ".join([*silent, *([kept] if kept is not None else [])])
