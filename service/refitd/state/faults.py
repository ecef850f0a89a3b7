"""What is wrong now with the root and the sources that name engines, and what a host knows of its upstream."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamWord:
    """What the upstream has said last, and since when it says nothing.

    `name` is what sentences call it: its URL. `host` is what it calls this host.
    `run` is the run that is followed, None where that is not known yet.
    `silent_since` is when it was heard last (RFC 3339), "" where that was not since the start, None while it is heard.
    `is_paused`: updates of the run are paused there. `leads`: it says what is served here.
    `wanted` is the id of the version that this host is to serve, `elsewhere` of the one that hosts
    are to serve which no hub leads, `pulling` of the one that is pulled now. `source`, `ahead` and `store_fault` are as
    in `Following`. `has_ended`: it has said that the run has
    ended, or that it has none of that name. `listed` are the ids of the versions of the run that it has named last,
    None where it was not heard yet. `disobeyed` is why engines here do not go where it wants, or that it does not know
    what they serve, in a sentence; None where neither is so. `reported` is when it took this host's last report
    (monotonic seconds), None where it took none since the start.
    """

    name: str
    host: str = ""
    run: str | None = None
    silent_since: str | None = None
    is_paused: bool = False
    leads: bool = False
    wanted: str | None = None
    elsewhere: str | None = None
    pulling: str | None = None
    source: str = ""
    ahead: int | None = None
    store_fault: str | None = None
    has_ended: bool = False
    listed: frozenset[str] | None = None
    disobeyed: str | None = None
    reported: float | None = None
