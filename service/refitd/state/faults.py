"""What is wrong now with the root, and with the sources that name engines."""

from collections.abc import Collection, Mapping


class InputFaults:
    """What is wrong with each input, as a sentence; None while nothing is. Only these methods change them.

    Attributes:
        root: why the root cannot be listed.
        fleet: why it is not known which engines there are.
        engines_file: why the engines file cannot be used. What it said before stays in force.
        discovery: why engines cannot be discovered.
        disk: that what is kept in the root does not fit the disk budget.
        folders: which folders of the root are not taken in yet.
        folders_left_out: how many these are.
        runs_left_out: the runs that they are of.
        push: why versions cannot be pushed to the object store.
        tls: why the files for TLS cannot be used, or that the certificate expires.
        upstream: why the upstream that is followed cannot be heard, or what it wants cannot be had.
    """

    def __init__(self) -> None:
        """Nothing has been read yet."""
        self.root: str | None = "the root has not been listed yet"
        self.fleet: str | None = "the engines have not been taken in yet"
        self.engines_file: str | None = None
        self.discovery: str | None = None
        self.disk: str | None = None
        self.folders: str | None = None
        self.folders_left_out = 0
        self.upstream: str | None = None
        self.push: str | None = None
        self.tls: str | None = None
        self.runs_left_out: Collection[str] = frozenset()

    @property
    def engines(self) -> str | None:
        """What is wrong with the list of engines: the most specific of the three reasons."""
        return self.engines_file or self.discovery or self.fleet

    def set_root(self, fault: str | None) -> None:
        """The root was listed, or could not be."""
        self.root = fault

    def set_fleet(self, fault: str | None) -> None:
        """Every source has named its engines, or one has not yet."""
        self.fleet = fault

    def set_engines_file(self, fault: str | None) -> None:
        """The engines file was read, or could not be."""
        self.engines_file = fault

    def set_discovery(self, fault: str | None) -> None:
        """The places of `--discover` were asked, or could not be."""
        self.discovery = fault

    def set_upstream(self, fault: str | None) -> None:
        """The upstream was asked, or did not answer."""
        self.upstream = fault

    def set_push(self, fault: str | None) -> None:
        """Good versions were pushed, or could not be."""
        self.push = fault

    def set_tls(self, fault: str | None) -> None:
        """The files for TLS were read, or could not be used."""
        self.tls = fault

    def set_disk(self, fault: str | None) -> None:
        """What is kept was held against the disk budget."""
        self.disk = fault

    def leave_out(self, folders: Mapping[str, int], fault: str | None) -> None:
        """So many folders of each run were left out when the root was last listed; `fault` says so, None where none."""
        self.folders = fault
        self.folders_left_out = sum(folders.values())
        self.runs_left_out = frozenset(folders)
