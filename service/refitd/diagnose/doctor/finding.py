"""What doctor finds: one line for each check of each subject, with a verdict and, where something is wrong, a fix."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a check ended. UNKNOWN: it cannot be known from here, which is never taken for good."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Check(StrEnum):
    """What is checked."""

    ROOT = "root"
    EVENTS = "events"
    SPACE = "space"
    ROOT_CLOCK = "root-clock"
    SETTINGS = "settings"
    TOKEN = "token"  # noqa: S105 - the name of a check
    JOURNAL = "journal"
    LOCK = "lock"
    PLACES = "places"
    ENGINES = "engines"
    REACHABLE = "reachable"
    CHANGES = "changes"
    ENGINE_CLOCK = "engine-clock"
    PLUGIN = "plugin"
    SHARED_FILES = "shared-files"
    HUB = "hub"
    START_UP_MODEL = "start-up-model"
    GPUS = "gpus"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. `fix` says what to do; None where nothing has to be done."""

    check: Check
    subject: str
    verdict: Verdict
    text: str
    fix: str | None = None


def good(check: Check, subject: str, text: str) -> Finding:
    """Nothing has to be done."""
    return Finding(check=check, subject=subject, verdict=Verdict.OK, text=text)
