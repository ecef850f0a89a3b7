"""What a job takes of its host's memory where the root is on a tmpfs, whether it is there, and what takes less. Pure.

A root on a tmpfs is host memory: the versions that are kept, the slots, the one that is being written and, with deltas,
the copies that they are applied to. A publisher that looks for changes keeps its weights once more beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from refitd_client.errors import PlanRefusedError
from refitd_client.publish.durability import NEVER
from refitd_plan.machine import LEAST_MEMORY
from refitd_plan.plan import PlannedChange
from refitd_plan.transport import WeightTransport

HOST_HEADROOM = 0.05
"""The share that stays free: a tmpfs takes no page that the kernel does not have, and the job needs memory as well."""

BY_FILES = frozenset({WeightTransport.DISK, WeightTransport.DISK_DELTA})
"""The transports that are files."""

MOST_HOST_MEMORY = 65_536.0
_FEWEST_KEPT = 2  # the one that engines are on their way to, and the last good one


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRoot:
    """How many versions lie in host memory, by the defaults of `refitd serve` and of the publisher."""

    keep_last: int = 3
    slots: int = 2
    written: int = 1
    copies: int = 0
    shadow: int = 0

    @property
    def versions(self) -> int:
        """All together."""
        return self.keep_last + self.slots + self.written + self.copies + self.shadow

    def __str__(self) -> str:
        deltas = f", {self.copies} copies for deltas, 1 that the publisher compares with" if self.copies else ""
        return f"{self.versions} versions ({self.keep_last} kept, {self.slots} slots, 1 being written{deltas})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What is taken of a host's memory, in GiB. `has` is None where it was not given.

    `changes` make it fit, in order: none where it fits, None where no set of them does.
    """

    needs: float
    has: float | None
    fault: str | None
    changes: tuple[PlannedChange, ...] | None


def check_host(memory: object, nodes: int) -> None:
    """Refuse what cannot be the memory of the one host that a root on a tmpfs is on. None passes.

    Raises:
        PlanRefusedError: it is no such size, or the job lies on several hosts.
    """
    if memory is None:
        return
    if not isinstance(memory, int | float) or isinstance(memory, bool):
        raise PlanRefusedError(f"--host-memory is {memory!r}, which is no number")
    if not LEAST_MEMORY <= memory <= MOST_HOST_MEMORY:
        raise PlanRefusedError(
            f"--host-memory is {memory:g} GiB: a host has {LEAST_MEMORY:g} to {MOST_HOST_MEMORY:g} (GiB, so 512)"
        )
    if nodes > 1:
        raise PlanRefusedError(
            f"--host-memory is for a root on a tmpfs, which one node alone sees, and this job has {nodes}: leave it out"
        )


def on_root(transport: WeightTransport) -> OnRoot:
    """What lies on a root where weights take this transport."""
    return OnRoot(copies=2, shadow=1) if transport is WeightTransport.DISK_DELTA else OnRoot()


def files_lie(transport: WeightTransport, durable: str, *, by_refitd: bool) -> bool:
    """Whether versions lie on the root: also those that engines took from memory do, whose files follow, unless the
    trainer's `durable` is `never`. What a trainer broadcasts itself has no files.

    Args:
        transport: how the weights go.
        durable: as `WeightPublisher` takes it.
        by_refitd: whether refitd carries the transport out.
    """
    return transport in BY_FILES or (by_refitd and durable != NEVER)


def host_memory(transport: WeightTransport, version: float, has: float | None, *, files: bool) -> Host:
    """What the root takes, and what makes it fit.

    Args:
        transport: how the weights go.
        version: the size of one version, in GiB.
        has: the host's memory, in GiB; None where it was not given.
        files: whether versions lie on the root (`files_lie`): where they do not, it always fits.
    """
    held = on_root(transport)
    needs = held.versions * version
    if has is None or not files or _fits(held, version, has):
        return Host(needs=needs, has=has, fault=None, changes=())
    fault = (
        f"a root on a tmpfs would hold {held} of {version:.1f} GiB, {needs:.1f} GiB in all, and the host has {has:g}, "
        f"of which {HOST_HEADROOM:.0%} is to stay free"
    )
    fewer_kept = replace(held, keep_last=_FEWEST_KEPT)
    fewer = [fewer_kept]  # fewer of one kind before fewer of both
    fewer += [replace(start, slots=slots) for start in (held, fewer_kept) for slots in range(held.slots - 1, -1, -1)]
    fitting = next((less for less in fewer if _fits(less, version, has)), None)
    changes = None if fitting is None else tuple(_changes(held, fitting, version))
    return Host(needs=needs, has=has, fault=fault, changes=changes)


def _fits(held: OnRoot, version: float, has: float) -> bool:
    return held.versions * version <= has * (1 - HOST_HEADROOM)


def _changes(held: OnRoot, less: OnRoot, version: float) -> Iterator[PlannedChange]:
    for setting, costs in (
        ("keep_last", "fewer versions to go back to (refitd serve --keep-last)"),
        ("slots", "slower publishing into new pages (refitd serve --slots)"),
    ):
        before, after = getattr(held, setting), getattr(less, setting)
        if after != before:
            saves = round((before - after) * version, 2)
            yield PlannedChange(setting=setting, value=after, saves=saves, costs=costs)
