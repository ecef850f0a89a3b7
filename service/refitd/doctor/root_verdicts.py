"""What is to be said of a root that was looked at: events, its clock, and room for what is kept. Pure."""

from collections.abc import Iterator

from refitd.catalog.watch import wants_polling
from refitd.doctor.finding import Check, Finding, Verdict, good
from refitd.doctor.root_facts import EVENT_SECONDS, RootFacts
from refitd.settings import Settings, Watch

SKEW_SECONDS = 2.0


def judge_root(facts: RootFacts, settings: Settings) -> Iterator[Finding]:
    """What the observations mean."""
    subject = str(facts.path)
    yield good(Check.ROOT, subject, f"can be written; it is on {facts.kind or 'a file system that nobody names'}")
    yield _events(facts, settings, subject)
    yield _clock(facts, subject)
    yield _space(facts, settings, subject)


def judge_base_model(settings: Settings, fault: str | None) -> Iterator[Finding]:
    """The model that checkpoints are held against, where one is named: a start with it is refused for the same."""
    if settings.base_model is None:
        return
    subject = str(settings.base_model)
    if fault is None:
        yield good(Check.BASE_MODEL, subject, "can be read: checkpoints are held against its tensors")
    else:
        fix = "name the folder of the model that the engines serve"
        yield Finding(check=Check.BASE_MODEL, subject=subject, verdict=Verdict.FAILED, text=fault, fix=fix)


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
    text = f"the file system's clock differs by {round(facts.skew, 1) + 0.0:+.1f} s"  # and not by -0.0
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
        f"{kept} {what} of {_gb(facts.version)} ({settings.keep_last} kept, {settings.slots} slots, 1 being written"
        f"{of_deltas}) take {_gb(needed)}; there are {_gb(there)}"
    )
    if settings.disk_budget is not None and needed > settings.disk_budget:
        text, there = f"{text}, and --disk-budget is {_gb(settings.disk_budget)}", settings.disk_budget
    if needed <= there:
        return good(Check.SPACE, subject, text)
    fix = "make room, or keep fewer: --keep-last, --slots" + (", --copies or --copies-folder" if copies else "")
    return Finding(check=Check.SPACE, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)


def _gb(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
