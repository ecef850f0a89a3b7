"""The ranks that can receive weights over a process group, as the service names them to a trainer."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """One rank of an engine with refitd inside.

    `name` is that of its socket, which no other rank ever has. `host` and `boot` (the kernel's id of the boot) say
    where it runs, `device` is the UUID of its GPU, "" where it has none. `backends` are those of its torch (`gloo`,
    `nccl`). `needs` is the digest of what it needs of a version, "" where that is everything or not known.
    """

    engine: str
    rank: int
    name: str
    host: str
    boot: str
    device: str = ""
    backends: list[str] = field(default_factory=list[str])
    needs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """All that a run has: those of its engines that answer. `others` are ids of its engines that have none."""

    receivers: list[Receiver]
    others: list[str] = field(default_factory=list[str])
