"""What a restart of an engine costs where it serves a version that is in memory alone. Pure."""

from collections.abc import Iterator

from refitd.diagnose.doctor.finding import CheckName, Finding, good, warning
from refitd.diagnose.journal import JournalFacts
from refitd.policy.goals import last_good
from refitd.state.version import VersionRecord
from refitd.text import size_of

_FIX = "publish a version with files: any transport with durable='always', or transport='disk'"


_PUSHED = "where the store is to have each version, publish with durable='always'"


def judge_durability(journal: JournalFacts, push: str | None = None) -> Iterator[Finding]:
    """Say of each run whose engines serve a version without files where they, or a rollback, would go back to.

    Args:
        journal: what the service knows.
        push: the object store that it pushes to, None where it pushes to none.
    """
    serving = [engine.serving for engine in journal.engines.values() if engine.known]
    held = [version for version in journal.versions.values() if version.in_memory and version.id in serving]
    for run in sorted({version.run for version in held}):
        newest = max((version for version in held if version.run == run), key=lambda version: version.order)
        good_one = last_good(version for version in journal.versions.values() if version.run == run)
        count = serving.count(newest.id)
        text = (
            f"{count} engine{'s serve' if count > 1 else ' serves'} {newest.id} from memory alone "
            f"({newest.files_to_come if newest.state.is_open else newest.reason}): {_leads(newest, good_one)}"
        )
        is_chosen = newest.durability is not None and newest.state.is_open and good_one is not None
        yield good(CheckName.VERSIONS, run, text) if is_chosen else warning(CheckName.VERSIONS, run, text, _FIX)
        if push is not None:
            has = "no version of the run" if good_one is None else f"{good_one.id} at most"
            text = f"{newest.id} has no files, and only versions with files are pushed: {push} gets {has}"
            yield warning(CheckName.VERSIONS, run, text, _PUSHED)


def _leads(newest: VersionRecord, good_one: VersionRecord | None) -> str:
    if good_one is None:
        return "no version of the run has good files, so one that restarts stays on its start-up weights"
    size = "" if good_one.bytes is None else f", and loads {size_of(good_one.bytes)}"
    if good_one.order.generation != newest.order.generation:
        return f"one that restarts goes back to {good_one.id}, of an earlier generation{size}"
    steps = newest.order.step - good_one.order.step
    return f"one that restarts goes back to {good_one.id}, by {steps} step{'s' * (steps != 1)}{size}"
