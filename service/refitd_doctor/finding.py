"""What doctor finds."""

from dataclasses import dataclass
from enum import StrEnum


class CheckVerdict(StrEnum):
    """How a check ended. UNKNOWN: it cannot be known from here, which never counts as OK."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class CheckName(StrEnum):
    ROOT = "root"
    SPACE = "space"
    SETTINGS = "settings"
    JOURNAL = "journal"
    SERVICE = "service"
    STORE = "store"
    UPSTREAM = "upstream"
    VERSIONS = "versions"
    ENGINES = "engines"
    PLUGIN = "plugin"
    UPDATES = "updates"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `fix` says what to do; None where nothing has to be done."""

    check: CheckName
    subject: str
    verdict: CheckVerdict
    text: str
    fix: str | None = None


def good(check: CheckName, subject: str, text: str) -> Finding:
    return Finding(check, subject, CheckVerdict.OK, text)


def warning(check: CheckName, subject: str, text: str, fix: str) -> Finding:
    """A job can start with it."""
    return Finding(check, subject, CheckVerdict.WARNING, text, fix)


def failed(check: CheckName, subject: str, text: str, fix: str) -> Finding:
    """It has to be corrected first."""
    return Finding(check, subject, CheckVerdict.FAILED, text, fix)


def unknown(check: CheckName, subject: str, text: str, fix: str) -> Finding:
    return Finding(check, subject, CheckVerdict.UNKNOWN, text, fix)
