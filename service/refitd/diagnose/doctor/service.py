"""The service's own things: its token, its journal, its lock."""

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.fsck.facts import JournalFacts
from refitd.diagnose.preflight import faults_of
from refitd.settings import LOOPBACK, Settings
from refitd.state.journal.condition import Corrupt, Missing, Newer, Sound, Unreadable
from refitd.state.journal.schema import SCHEMA_VERSION


def judge_service(settings: Settings, journal: JournalFacts, running: str | None) -> Iterator[Finding]:
    """Settings, token, journal and lock. `running` says who holds the root's lock, None where nobody does."""
    yield from judge_settings(settings)
    yield from _secret_files(settings)
    yield from _token(settings)
    yield _journal(journal)
    yield _lock(str(settings.root), running)


def _lock(root: str, running: str | None) -> Finding:
    """None that runs is no fault before a start, and the first thing to know where one should."""
    if running is not None:
        return good(Check.LOCK, root, f"a service runs on this root ({running})")
    text = "no service runs on this root: engines are brought to nothing new"
    fix = f"'refitd serve --root {shlex.quote(root)}' starts one"
    return Finding(check=Check.LOCK, subject=root, verdict=Verdict.WARNING, text=text, fix=fix)


def judge_settings(settings: Settings) -> Iterator[Finding]:
    """What a start would be refused for."""
    fix = "'refitd serve' does not start with it: name what is meant"
    for fault in faults_of(settings):
        yield Finding(check=Check.SETTINGS, subject="service", verdict=Verdict.FAILED, text=fault, fix=fix)


def _secret_files(settings: Settings) -> Iterator[Finding]:
    """Files of which each is as good as a token or a key: a webhook's URL can be one."""
    tokens = (settings.token_file, settings.read_token_file)
    keys = (settings.engine_key_file, settings.engine_admin_key_file)
    for file in (*tokens, *keys, settings.webhooks_file, settings.webhook_secret_file):
        if file is not None and (fault := _open_to_others(file)) is not None:
            fix = f"chmod 640 {file}"
            yield Finding(check=Check.TOKEN, subject=str(file), verdict=Verdict.WARNING, text=fault, fix=fix)


def _token(settings: Settings) -> Iterator[Finding]:
    if settings.tokens().write:
        yield good(Check.TOKEN, "service", "changes need a token")
    elif settings.host in LOOPBACK:
        yield good(Check.TOKEN, "service", "no token: it listens on loopback only")


def _open_to_others(file: Path) -> str | None:
    try:
        mode = stat.S_IMODE(os.stat(file).st_mode)  # noqa: PTH116 - as the path is, links followed
    except OSError:
        return None  # a key's file may come later; what cannot be read is said where it is used
    return f"every user can read it (mode {mode:o})" if mode & stat.S_IROTH else None


def _journal(journal: JournalFacts) -> Finding:
    subject, fix = str(journal.path), "refitd fsck says more, and --repair begins a new one"
    match journal.condition:
        case Sound(schema=schema):
            later = "" if schema == SCHEMA_VERSION else f"; the next start brings it to schema {SCHEMA_VERSION}"
            return good(Check.JOURNAL, subject, f"can be read to its end; schema {schema}{later}")
        case Missing() if not journal.elsewhere:
            return good(Check.JOURNAL, subject, "there is none yet: the service begins it")
        case Missing():
            text = f"there is none, and the root's last one lies in {journal.last_folder}"
            fix = f"--state {journal.last_folder}"
            return Finding(check=Check.JOURNAL, subject=subject, verdict=Verdict.WARNING, text=text, fix=fix)
        case Newer(schema=schema):
            text = f"a later refitd wrote it (schema {schema}, and this one knows {SCHEMA_VERSION})"
            fix = "run that refitd"
        case Corrupt(reason=reason):
            text = f"it is corrupt: {reason}"
        case Unreadable(reason=reason):
            text, fix = f"it cannot be read: {reason}", f"see who holds {journal.path} and who may read it"
    return Finding(check=Check.JOURNAL, subject=subject, verdict=Verdict.FAILED, text=text, fix=fix)
