"""The places of --discover asked: whom they name, before a service has ever looked."""

import asyncio
from collections.abc import Iterable, Iterator

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.discovery.asking import ask
from refitd.discovery.memory import Answer, Named, Silent
from refitd.discovery.place import parse_place
from refitd.root.threads import RootThreads
from refitd.settings import Settings


async def ask_places(settings: Settings) -> list[Answer]:
    """Ask all of them at once."""
    threads = RootThreads()
    return await asyncio.gather(*(ask(parse_place(place), threads) for place in settings.discover))


def judge_places(answers: Iterable[Answer]) -> Iterator[Finding]:
    """What they said."""
    for answer in answers:
        match answer:
            case Named(place=place, urls=urls) if urls:
                yield good(Check.PLACES, place, f"names {', '.join(sorted(urls))}")
            case Named(place=place):
                text, fix = "names no engine", "start engines that it names, or correct --discover"
                yield Finding(check=Check.PLACES, subject=place, verdict=Verdict.WARNING, text=text, fix=fix)
            case Silent(place=place, reason=reason):
                fix = "see that it can be reached from here, or correct --discover"
                yield Finding(check=Check.PLACES, subject=place, verdict=Verdict.FAILED, text=reason, fix=fix)
