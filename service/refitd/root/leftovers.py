"""What can lie under the root beside versions: folders that are being written, and slots."""

from dataclasses import dataclass

from refitd_client.contract.slot import slots_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A folder that is, or was, being written. `age` is in seconds, `bytes` counts its files."""

    path: str
    abandoned: bool
    reason: str
    age: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A folder among a run's slots. `layout` is None where it is none; `fault` says what is wrong with it.

    `ours` says whether this service can have put it there. Without a name it is the folder of a run's slots itself,
    and without a run that of all slots: neither can be read then.
    """

    run: str
    name: str
    bytes: int = 0
    layout: str | None = None
    fault: str | None = None
    ours: bool = True

    @property
    def path(self) -> str:
        """Where it lies, relative to the root."""
        return f"{slots_path(self.run)}/{self.name}".rstrip("/")
