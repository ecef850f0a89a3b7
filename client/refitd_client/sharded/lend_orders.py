"""What rank 0 and the others say to each other when the trainer's ranks lend their shards (`rank_group`)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd_client.transport.ipc.offer import DevicePlace, HostPlace
from refitd_client.transport.shards.strips import Strip

if TYPE_CHECKING:
    from refitd_client.sharded.rank_group import RankTask


@dataclass(frozen=True, slots=True, kw_only=True)
class LendOrder:
    """Scan what you write, and say where it lies: it must not change before the next order. `task` as for `WriteOrder`.

    `known` is the number of the places that rank 0 has from you, 0 for none.
    """

    task: "RankTask | None"
    known: int


@dataclass(frozen=True, slots=True)
class LentPart:
    """Bytes of a tensor that lie without gaps at a place, one strip after the other."""

    name: str
    strips: tuple[Strip, ...]
    place: HostPlace | DevicePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LentReply:
    """All is scanned, and lent from now on. `scans` are as in `StagedReply`.

    `places` have the number `number`, and are None where rank 0 has them. `lock` is the name of the lock that this rank
    holds as long as it lends (`transport.ipc.exporter`), "" on rank 0, which has the exporter's. `host` and `boot` say
    where it runs.
    """

    scans: dict[str, tuple[int, int]]
    number: int
    places: tuple[LentPart, ...] | None
    lock: str
    host: str
    boot: str
