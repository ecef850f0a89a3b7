"""Which rank computes on which GPU, and who meets whom there. Pure.

Groups take GPUs one after the other. A job that asks for more than there are begins again at the first, as AReaL's
local launcher does: that is how trainer and engine of a `d1+d1` come to lie on the one GPU of a machine. Launchers for
several nodes (Ray, Slurm) do not, so there such a job is refused.
"""

from dataclasses import dataclass

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import Allocation, Component, Role
from refitd_plan.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process on one GPU. `gpu` counts over all nodes; `device` is the GPU's identity."""

    component: Component
    index: int
    gpu: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All ranks. `wrapped`: the job asks for more GPUs than there are, so that some are used twice."""

    ranks: tuple[Rank, ...]
    wrapped: bool

    def of(self, role: Role) -> list[Rank]:
        """The ranks with a role."""
        return [rank for rank in self.ranks if rank.component.role is role]

    @property
    def update_group(self) -> list[Rank]:
        """Whom a broadcast of the weights would join: every rank that generates, and rank 0 of the first trainer."""
        return [self.of(Role.TRAINING)[0], *self.of(Role.GENERATION)]

    @property
    def doubled(self) -> str | None:
        """The first device that holds two ranks of the update group; None where each has its own."""
        devices = [rank.device for rank in self.update_group]
        return next((device for device in devices if devices.count(device) > 1), None)


def place(allocation: Allocation, machine: Machine) -> Placement:
    """Give each rank its GPU.

    Raises:
        PlanRefusedError: a part of the job is larger than the machine, the whole of it is and the machine has several
            nodes, or an engine would be torn over nodes.
    """
    if machine.nodes > 1 and allocation.world > machine.count:
        raise PlanRefusedError(
            f"{allocation.text} asks for {allocation.world} GPUs, and {machine.nodes} nodes of {len(machine.gpus)} "
            f"have {machine.count}: launchers for several nodes put no two parts on one GPU. To share them, write '|'"
        )
    ranks: list[Rank] = []
    begin = 0
    for group in allocation.groups:
        for member in group:
            _check(member, begin, machine)
            ranks += [_rank(member, index, begin, machine) for index in range(member.parallel.world)]
        begin += group[0].parallel.world
    return Placement(ranks=tuple(ranks), wrapped=allocation.world > machine.count)


def _rank(member: Component, index: int, begin: int, machine: Machine) -> Rank:
    gpu = (begin + index) % machine.count
    return Rank(component=member, index=index, gpu=gpu, device=machine.device(gpu))


def _check(member: Component, begin: int, machine: Machine) -> None:
    parallel, per_node = member.parallel, len(machine.gpus)
    if parallel.world > machine.count:
        nodes = f" on each of {machine.nodes} nodes" if machine.nodes > 1 else ""
        raise PlanRefusedError(
            f"{member.title} ({parallel}) has {parallel.world} ranks, and the machine has {per_node} GPUs{nodes}: "
            "no GPU can hold two ranks of one component"
        )
    if member.role is Role.TRAINING:
        return
    size = parallel.t * parallel.p
    if size > per_node and size % per_node:
        raise PlanRefusedError(f"an engine of {size} GPUs (t·p) cannot be laid on nodes of {per_node} GPUs")
    if size <= per_node and any((begin + size * i) % per_node + size > per_node for i in range(parallel.d)):
        raise PlanRefusedError(f"engines of {size} GPUs (t·p) would be torn over nodes of {per_node} GPUs")
