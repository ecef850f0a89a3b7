"""What is to be said of a root that was looked at: events, its clock, and room for what is kept. Pure."""

from collections.abc import Iterator

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.doctor.root_facts import EVENT_SECONDS, RootFacts
from refitd.root.file_systems import Watch, wants_polling
from refitd.settings import Settings
from refitd.text import size_of

SKEW_SECONDS = 2.0


def judge_root(facts: RootFacts, settings: Settings) -> Iterator[Finding]:
    """What the observations mean."""
    subject = str(facts.path)
    yield good(Check.ROOT, subject, f"can be written; it is on {facts.kind or 'a file system that nobody names'}")
    yield _events(facts, settings, subject)
    yield _clock(facts, subject)
    yield _space(facts, settings, subject)


def _events(facts: RootFacts, settings: Settings, subject: str) -> Finding:
    polls = settings.watch is Watch.POLL or (settings.watch is Watch.AUTO and wants_polling(facts.kind))
    if polls:
        return good(Check.EVENTS, subject, "the service polls, and needs no events")
    if facts.event:
        return good(Check.EVENTS, subject, "a write was told of")
    fix = "set --watch poll, or raise fs.inotify.max_user_watches and max_user_instances"
    text = f"a write was not told of within {EVENT_SECONDS:g} s: versions wait for the scan"
    return Finding(check=Check.EVENTS, subject=subject, verdict=Verdict.WARNING, text=text, fix=fix)


def _clock(facts: RootFacts, subject: str) -> Finding:
    text = f"the file system's clock differs by {round(facts.skew, 1) + 0.0:+.1f} s"
    if abs(facts.skew) <= SKEW_SECONDS:
        return good(Check.ROOT_CLOCK, subject, text)
    fix = "have the file server and this host follow one time server (NTP)"
    return Finding(check=Check.ROOT_CLOCK, subject=subject, verdict=Verdict.WARNING, text=text, fix=fix)


def _space(facts: RootFacts, settings: Settings, subject: str) -> Finding:
    if facts.version is None:
        text = "how much room versions need is not known: there is none yet"
        fix = "name --base-model, whose size a version has"
        return Finding(check=Check.SPACE, subject=subject, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    what = "versions" if settings.lora is None else "adapters"
    copies = settings.copies if settings.takes_deltas and settings.copies_folder is None else 0
    kept = settings.keep_last + settings.slots + 1 + copies
    needed, there = kept * facts.version, facts.free + facts.held
    of_deltas = f", {copies} copies for deltas" if copies else ""
    text = (
        f"{kept} {what} of {size_of(facts.version)} ({settings.keep_last} kept, {settings.slots} slots, 1 being written"
        f"{of_deltas}) take {size_of(needed)}; there are {size_of(there)}"
    )
    if settings.disk_budget is not None and needed > settings.disk_budget:
        text, there = f"{text}, and --disk-budget is {size_of(settings.disk_budget)}", settings.disk_budget
    if needed <= there:
        return good(Check.SPACE, subject, text)
    fix = "make room, or keep fewer: --keep-last, --slots" + (", --copies or --copies-folder" if copies else "")
    return Finding(check=Check.SPACE, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
