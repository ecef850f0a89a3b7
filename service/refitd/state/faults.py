"""What is wrong now with the root and the sources that name engines, and what a host knows of its upstream."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from refitd.state.version import VersionRecord


@dataclass(slots=True)
class InputFaults:
    """What is wrong with each input, as a sentence; None while nothing is.

    `fleet`: why it is not known which engines there are. `engines_file`: why the engines file cannot be used; what it
    said before stays in force. `disk`: what is kept in the root does not fit the disk budget. `folders`: which folders
    of the root are not taken in yet, `folders_left_out` how many, of `runs_left_out`. `tls`: why the files for TLS
    cannot be used, or that the certificate expires. `upstream`: why the upstream that is followed cannot be heard, or
    what it wants cannot be had.
    """

    root: str | None = "the root has not been listed yet"
    fleet: str | None = "the engines have not been taken in yet"
    engines_file: str | None = None
    discovery: str | None = None
    disk: str | None = None
    folders: str | None = None
    folders_left_out: int = 0
    runs_left_out: Collection[str] = frozenset()
    push: str | None = None
    tls: str | None = None
    upstream: str | None = None

    @property
    def engines(self) -> str | None:
        """What is wrong with the list of engines: the most specific of the three reasons."""
        return self.engines_file or self.discovery or self.fleet

    def set(self, **faults: str | None) -> None:
        """Inputs were looked at, by their names."""
        for name, fault in faults.items():
            setattr(self, name, fault)

    def leave_out(self, folders: Mapping[str, int], fault: str | None) -> None:
        """So many folders of each run were left out when the root was last listed; `fault` says so, None where none."""
        self.folders, self.folders_left_out = fault, sum(folders.values())
        self.runs_left_out = frozenset(folders)


class FollowedUpstream(Protocol):
    """What is known of the upstream that this service follows; a ring follows one. What it says has no full stop.

    Attributes:
        name: what sentences call it.
        run: the run that is followed; None where that is not known yet.
        silent_since: when it was heard last, "" where that was not since the start; None while it is heard.
        is_paused: whether updates of the run are paused there.
        trouble: since when nothing was heard, or why engines here do not go where it wants.
    """

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> str | None: ...
    @property
    def silent_since(self) -> str | None: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def trouble(self) -> str | None: ...
    @property
    def whom_it_follows(self) -> str: ...

    def waits_for(
        self, target: VersionRecord | None, newest: VersionRecord | None, *, is_paused: bool = False
    ) -> str | None:
        """Say what keeps a host from anything newer, or what it pulls; None where that is nothing of the upstream's.

        Args:
            target: what the engines of this host should serve now.
            is_paused: whether updates of the run are paused on this host itself.
        """
        ...

    def pulls_newer(self, newest: VersionRecord | None) -> bool:
        """Whether a version is pulled that is newer than the newest that is here."""
        ...

    def not_brought(self, run: str) -> str:
        """Say why a run that this host does not follow gets no engines here, and what to do."""
        ...

    def last_report(self, now: float) -> list[str]:
        """Say how old the last report is that it has taken of this host."""
        ...

    def about_pulls(self) -> list[str]:
        """Say from where this host does not pull, and why."""
        ...
