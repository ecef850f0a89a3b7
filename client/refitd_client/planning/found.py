"""The machine of a plan: what was said of it, and for the rest what the driver says. What was said wins."""

from collections.abc import Callable, Sequence

from refitd_client.errors import PlanRefusedError
from refitd_client.planning.faults import positive
from refitd_client.planning.machine import Gpu, Machine

_MOST_GPUS = 1024


def machine_for(
    *,
    gpus_per_node: int | None,
    gpu_memory: float | None,
    nodes: int | None,
    shared_files: bool,
    read: Callable[[], Sequence[Gpu]],
) -> tuple[Machine, list[str]]:
    """The machine, and what is assumed of it. `read` asks the driver, and is called only if something was left unsaid.

    Raises:
        PlanRefusedError: a number cannot be, or nobody knows how many GPUs there are.
    """
    positive("--gpus-per-node", gpus_per_node, most=_MOST_GPUS)
    positive("--nodes", nodes, most=65_536)
    seen = [] if gpus_per_node is not None and gpu_memory is not None else list(read())
    gpus, assumed = _gpus(gpus_per_node, gpu_memory, seen)
    if nodes is None:
        assumed.append("the job has one node")
    if any(gpu.uuid is None for gpu in gpus):
        assumed.append("the GPUs of a node are told apart by their number: no UUID was read")
    return Machine(gpus=gpus, nodes=nodes or 1, shared_files=shared_files), assumed


def _gpus(count: int | None, memory: float | None, seen: list[Gpu]) -> tuple[tuple[Gpu, ...], list[str]]:
    if not seen:
        if count is None:
            raise PlanRefusedError("no GPU can be read here: give --gpus-per-node and --gpu-memory")
        return (Gpu(memory=memory),) * count, []
    if count is None or count <= len(seen):
        own = tuple(seen[:count])
        known = own if memory is None else tuple(Gpu(memory=memory, uuid=gpu.uuid, name=gpu.name) for gpu in own)
        return known, []
    alike = f"the job's machine has {count} GPUs like the {len(seen)} that were read here"
    return (Gpu(memory=memory or min(gpu.memory or 0.0 for gpu in seen)),) * count, [alike]
