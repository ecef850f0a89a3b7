"""The lease by which this service leads an engine: it is renewed at each of the engine's ranks.

A plugin that knows no leases is not asked. A lease that is refused, because another service has it, is asked for again
at each look: it ends with that service.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refitd.engine.plugin.channels import Channels
from refitd.engine.plugin.rank_group import MOST_REASON, EngineRankGroup, Member, Stock, shown
from refitd_client.contract.plugin import Owner
from refitd_client.files.durable import replace_file
from refitd_client.files.plain_file import read_plain

SECONDS = 30.0  # of a lease; longer where engines are asked more seldom
PROBES = 5  # that a lease outlasts at least
_WITHIN = 2.0  # seconds
_ID_FILE = "id"
_ID_BYTES = 64  # bytes


def _often() -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leads:
    """A lease: who leads, and for how many seconds at least. `apart` says how many seconds the service lets pass now
    between two looks at an engine that is at rest.
    """

    owner: Owner
    seconds: float = SECONDS
    apart: Callable[[], float] = _often

    @property
    def lasts(self) -> float:
        """Seconds that a lease lasts that is taken or renewed now."""
        return max(self.seconds, PROBES * self.apart())


def leads_of(root: Path, state_folder: Path, probe_interval: float, apart: Callable[[], float] = _often) -> Leads:
    """Return the lease of the service of a root. Its name is kept in the state folder, made once. Blocks.

    Args:
        root: its folder.
        state_folder: the service's own.
        probe_interval: seconds between two looks at an engine, as the operator wants.
        apart: as of `Leads`.

    Raises:
        OSError: the folder cannot be read or written.
    """
    owner = Owner(service=_name(state_folder), root=str(root), host=socket.gethostname(), pid=os.getpid())
    return Leads(owner=owner, seconds=max(SECONDS, PROBES * probe_interval), apart=apart)


def _name(folder: Path) -> str:
    path = folder / _ID_FILE
    if not path.is_file():
        replace_file(path, f"{os.urandom(16).hex()}\n".encode(), by=folder / f".{_ID_FILE}-{os.getpid()}")
    return read_plain(path, _ID_BYTES).decode(errors="replace").strip()


def leads_of_group(
    root: Path, service: str, epoch: int, probe_interval: float, apart: Callable[[], float] = _often
) -> Leads:
    """Return the lease of the service that leads a group.

    Args:
        root: its folder.
        service: the group's name.
        epoch: of the lead.
        probe_interval: seconds between two looks at an engine, as the operator wants.
        apart: as of `Leads`.
    """
    owner = Owner(service=service, root=str(root), host=socket.gethostname(), pid=os.getpid(), epoch=epoch)
    return Leads(owner=owner, seconds=max(SECONDS, PROBES * probe_interval), apart=apart)


class Leading:
    """One engine's lease. `led_by` names the other service that has it, in a sentence; None where none has."""

    def __init__(self, channels: Channels, leads: Leads) -> None:
        self.led_by: str | None = None
        self._channels = channels
        self._leads = leads
        self._told: tuple[Member, ...] = ()
        self._seconds = 0.0
        self._again_at = 0.0

    async def say(self, rank_group: EngineRankGroup | Stock) -> None:
        """Ask the ranks for the lease, if it is time to. Takes seconds at most."""
        if not isinstance(rank_group, EngineRankGroup) or not all(
            member.handshake.leads for member in rank_group.members
        ):
            self.led_by, self._told = None, ()
            return
        now, seconds = time.monotonic(), self._leads.lasts
        is_told = rank_group.members == self._told and self._seconds >= seconds
        if is_told and self.led_by is None and now < self._again_at:
            return
        request = {"do": "lead", "owner": msgspec.to_builtins(self._leads.owner), "seconds": seconds}
        replies = await self._channels.ask_all(rank_group.members, request, _WITHIN)
        refused = [each for each in replies if isinstance(each, dict) and each.get("ok") is not True]
        self.led_by = shown(str(refused[0].get("reason", "")), MOST_REASON) if refused else None
        self._told, self._seconds, self._again_at = rank_group.members, seconds, now + seconds / 3
