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
    """What is checked."""

    ROOT = "root"
    EVENTS = "events"
    SPACE = "space"
    ROOT_CLOCK = "root-clock"
    SETTINGS = "settings"
    TOKEN = "token"  # noqa: S105 - the name of a check
    TLS = "tls"
    JOURNAL = "journal"
    GROUP = "group"
    LOCK = "lock"
    DURABILITY = "durability"
    PLACES = "places"
    STORE = "store"
    UPSTREAM = "upstream"
    VERSIONS = "versions"
    ENGINES = "engines"
    RUNS = "runs"
    REACHABLE = "reachable"
    CHANGES = "changes"
    ENGINE_CLOCK = "engine-clock"
    PLUGIN = "plugin"
    UPDATES = "updates"
    SHARED_FILES = "shared-files"
    START_UP_MODEL = "start-up-model"
    HUGGING_FACE = "hugging-face"
    GPUS = "gpus"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `fix` says what to do; None where nothing has to be done."""

    check: CheckName
    subject: str
    verdict: CheckVerdict
    text: str
    fix: str | None = None


def good(check: CheckName, subject: str, text: str) -> Finding:
    """A finding that needs nothing to be done."""
    return Finding(check, subject, CheckVerdict.OK, text)


def warning(check: CheckName, subject: str, text: str, fix: str) -> Finding:
    """A finding that a job can start with. The arguments are the fields of `Finding`."""
    return Finding(check, subject, CheckVerdict.WARNING, text, fix)


def failed(check: CheckName, subject: str, text: str, fix: str) -> Finding:
    """A finding that has to be corrected first. The arguments are the fields of `Finding`."""
    return Finding(check, subject, CheckVerdict.FAILED, text, fix)


def unknown(check: CheckName, subject: str, text: str, fix: str | None = None) -> Finding:
    """What cannot be known from here. The arguments are the fields of `Finding`."""
    return Finding(check, subject, CheckVerdict.UNKNOWN, text, fix)
