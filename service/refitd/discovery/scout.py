"""The scout asks all places again and again, and tells the fleet which engines there are.

`remember` decides, without I/O. A place that does not answer, or that suddenly has no engines, is more often broken
than right. So an engine that was found once stays until every place has answered, some engine was found, and it has
been missing for `GONE_SECONDS`. Any fault keeps all engines, and is reported as long as it lasts.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog

from refitd.clock import Clock
from refitd.discovery.asking import ask
from refitd.discovery.place import MOST, Answer, EnginesFound, Place, Silent
from refitd.root.handle import RootThreads

ASK_EVERY_SECONDS = 5.0
GONE_SECONDS = 60.0

log = structlog.get_logger("refitd")


@dataclass(frozen=True, slots=True)
class Discovered:
    """Engines by URL, each with the time (monotonic seconds) since which no place has it; None while a place has it.

    `fault` is why no engine may be removed now; None where nothing is wrong.
    """

    missing_since: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    fault: str | None = None


def remember(before: Discovered, answers: Sequence[Answer], now: float) -> Discovered:
    """Return what is discovered after all places have answered.

    Args:
        before: what was discovered until now.
        answers: one for each place.
        now: monotonic seconds.
    """
    answers = [_believed(answer) for answer in answers]
    found = frozenset[str]().union(*(answer.urls for answer in answers if isinstance(answer, EnginesFound)))
    fault = _fault(answers, found, before)
    after: dict[str, float | None] = dict.fromkeys(sorted(found))
    for url, since in before.missing_since.items():
        if url in found:
            continue
        if fault is not None:
            after[url] = since  # how long it has been missing cannot be known
        elif since is None or now - since < GONE_SECONDS:
            after[url] = now if since is None else since
    return Discovered(after, fault)


def _believed(answer: Answer) -> Answer:
    if isinstance(answer, EnginesFound) and len(answer.urls) > MOST:
        return Silent(answer.place, f"it names {len(answer.urls)} engines, and at most {MOST} are believed")
    return answer


def _fault(answers: Sequence[Answer], found: frozenset[str], before: Discovered) -> str | None:
    silent = [f"{answer.place}: {answer.reason}" for answer in answers if isinstance(answer, Silent)]
    count = len(before.missing_since)
    stays = "1 engine that was found before stays" if count == 1 else f"{count} engines that were found before stay"
    kept = [stays] if count else []
    if not silent and not found and kept:
        silent = [f"{answer.place} names no engine" for answer in answers]
    return "engines cannot be found: " + "; ".join([*silent, *kept]) if silent else None


class Scout:
    """Asks places until it is cancelled."""

    def __init__(
        self,
        places: Sequence[Place],
        known: Collection[str],
        tell: Callable[[Collection[str], str | None], None],
        clock: Clock,
    ) -> None:
        """Ask nothing yet.

        Args:
            places: where engines can be found.
            known: URLs of the engines that were found before this start.
            tell: called after each round with the URLs of all engines, and with the fault that keeps any from being
                removed.
            clock: the time.
        """
        self._places = places
        self._discovered = Discovered(dict.fromkeys(known))
        self._tell = tell
        self._clock = clock
        self._threads = RootThreads()

    async def run(self) -> None:
        """Look now and every `ASK_EVERY_SECONDS`."""
        while self._places:
            await self.look()
            await asyncio.sleep(ASK_EVERY_SECONDS)

    async def look(self) -> None:
        """Ask every place once, all at the same time."""
        answers = await asyncio.gather(*(ask(place, self._threads) for place in self._places))
        before, self._discovered = self._discovered, remember(self._discovered, answers, self._clock.monotonic())
        if self._discovered.fault is not None and self._discovered.fault != before.fault:
            log.warning("no engine is removed", reason=self._discovered.fault)
        self._tell(self._discovered.missing_since.keys(), self._discovered.fault)
