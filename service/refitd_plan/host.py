"""What a job takes of its host's memory where the root is on a tmpfs, and whether it is there. Pure.

A root on a tmpfs is host memory: the versions that are kept, the slots, the one that is being written and, with deltas,
the copies that they are applied to. A publisher that looks for changes keeps its weights once more beside them. The
numbers are the defaults of `refitd serve` and of the publisher.
"""

from refitd_client.errors import PlanRefusedError
from refitd_plan.machine import LEAST_MEMORY
from refitd_plan.transport import WeightTransport

_HEADROOM = 0.05  # stays free: a tmpfs takes no page that the kernel does not have, and the job needs memory as well
_MOST_HOST_MEMORY = 65_536.0
_KEPT_ON_ROOT, _SLOTS_ON_ROOT, _WRITTEN_ON_ROOT, _COPIES_ON_ROOT, _COMPARED_ON_ROOT = 3, 2, 1, 2, 1
_BY_FULL_FILES = _KEPT_ON_ROOT + _SLOTS_ON_ROOT + _WRITTEN_ON_ROOT
_FEWEST = 3  # versions that less is kept of: two in place of three, and no slots


def check_host(memory: object, nodes: int) -> None:
    """Refuse what cannot be the memory of the one host that a root on a tmpfs is on. None passes.

    Raises:
        PlanRefusedError: it is no such size, or the job lies on several hosts.
    """
    if memory is None:
        return
    if not isinstance(memory, int | float) or isinstance(memory, bool):
        raise PlanRefusedError(f"--host-memory is {memory!r}, which is no number")
    if not LEAST_MEMORY <= memory <= _MOST_HOST_MEMORY:
        raise PlanRefusedError(
            f"--host-memory is {memory:g} GiB: a host has {LEAST_MEMORY:g} to {_MOST_HOST_MEMORY:g} (GiB, so 512)"
        )
    if nodes > 1:
        raise PlanRefusedError(
            f"--host-memory is for a root on a tmpfs, which one node alone sees, and this job has {nodes}: leave it out"
        )


def versions_on_root(transport: WeightTransport) -> int:
    """How many versions lie in host memory where weights take this transport."""
    return _BY_FULL_FILES + (_COPIES_ON_ROOT + _COMPARED_ON_ROOT if transport is WeightTransport.DISK_DELTA else 0)


def on_root(transport: WeightTransport) -> str:
    """The same in words."""
    deltas = f", {_COPIES_ON_ROOT} copies for deltas, {_COMPARED_ON_ROOT} that the publisher compares with"
    more = deltas if transport is WeightTransport.DISK_DELTA else ""
    count = versions_on_root(transport)
    return f"{count} versions ({_KEPT_ON_ROOT} kept, {_SLOTS_ON_ROOT} slots, {_WRITTEN_ON_ROOT} being written{more})"


def host_fault(transport: WeightTransport, version: float, has: float) -> str | None:
    """Why the root does not fit into the host's memory, and what takes less; None where it fits.

    Args:
        transport: how the weights go.
        version: the size of one version, in GiB.
        has: the host's memory, in GiB.
    """
    count, most = versions_on_root(transport), has * (1 - _HEADROOM)
    if count * version <= most:
        return None
    fewer = count - _FEWEST
    remedy = "'refitd serve --keep-last 2 --slots 0' takes" if fewer * version <= most else "and at least"
    return (
        f"a root on a tmpfs would hold {on_root(transport)} of {version:.1f} GiB, {count * version:.1f} GiB in all, "
        f"and the host has {has:g}, of which {_HEADROOM:.0%} is to stay free: {remedy} {fewer * version:.1f} GiB"
    )
