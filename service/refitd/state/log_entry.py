"""Entries of the log of decisions: how grave each is, which run it concerns, and which of them a reader asks for.

An entry says what became of a version, an engine, an update or a run, or what is wrong with the root or the journal. It
is written once and never changed, so that what follows from later decisions is not in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refitd_client.contract.naming import parse_version_id
from refitd_client.contract.states import EngineState, LogSeverity, VersionState
from refitd_client.contract.wire import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which entries a reader asks for; None asks for all.

    Attributes:
        run: those that concern the run: its versions, its updates, and the engines that followed it at the time.
        engine: those about the engine of this id.
        severity: those that are at least so grave.
    """

    run: str | None = None
    engine: str | None = None
    severity: LogSeverity | None = None

    def fits(self, event: Event) -> bool:
        """Whether the reader asks for this entry."""
        return (
            (self.run is None or event.run == self.run)
            and (self.engine is None or (event.kind, event.subject) == ("engine", self.engine))
            and (self.severity is not LogSeverity.WARNING or event.severity is LogSeverity.WARNING)
        )


EVERYTHING = LogFilter()


def severity_of(data: Mapping[str, Any]) -> LogSeverity:
    """How grave it is that something came to the state that an entry's data names."""
    grave = (*(v for v in VersionState if v.is_bad), *(e for e in EngineState if e.is_in_trouble))
    return LogSeverity.WARNING if data.get("state") in grave else LogSeverity.INFO


def run_of(kind: str, subject: str) -> str | None:
    """The run that an entry about a version, an update or a run concerns; None for any other subject."""
    if kind == "run":
        return subject
    parsed = parse_version_id(subject) if kind in {"version", "update"} else None
    return None if parsed is None else parsed[0]


def named(event: Event) -> Mapping[str, Any]:
    """What the entry is about, under the names that the log lines of the service's tasks use."""
    match event.kind:
        case "version" | "engine":
            return {event.kind: event.subject}
        case "update":
            return {"version": event.subject, "update": event.data["number"]}
        case _:
            return {}
