"""What a restart of an engine, or a rollback, costs where not each version gets files. Pure."""

from refitd_client.errors import PlanRefusedError
from refitd_client.publish.durability import ALWAYS, DurabilityPolicy
from refitd_plan.transport import WeightTransport

_FROM_MEMORY = frozenset({WeightTransport.HANDOVER, WeightTransport.NCCL, WeightTransport.GLOO})


def restart_cost(durable: str, transport: WeightTransport, version: float | None) -> str | None:
    """What the trainer's `durable` costs, in a sentence; None where each version gets files.

    Args:
        durable: as `WeightPublisher` takes it.
        transport: the one that the plan has chosen.
        version: the bytes of a version, None where they are not known.

    Raises:
        PlanRefusedError: there is no such policy.
    """
    try:
        policy = DurabilityPolicy.of(durable)
    except ValueError as error:
        raise PlanRefusedError(f"--{error}") from None
    if policy.text == ALWAYS or policy.every == 1:
        return None
    if transport not in _FROM_MEMORY:
        return f"durable={durable} changes nothing: over {transport} each version has files"
    size = "a whole version" if version is None else f"{version / 1e9:.3g} GB"
    if policy.every is None:
        return (
            f"durable={durable}: an engine that restarts, and a rollback, go back to the newest version that got files "
            f"because an engine did not take it, and load {size}; without one an engine stays on its start-up weights"
        )
    back = policy.every - 1
    return (
        f"durable={durable}: an engine that restarts, and a rollback, go back by at most {back} "
        f"version{'s' * (back > 1)}, to the newest with files, and load {size}"
    )
