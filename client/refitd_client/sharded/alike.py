"""What all ranks have to ask for alike."""

from refitd_client.errors import PublishError, StepConflictError
from refitd_client.sharded.rank_group import Opening


def require_alike(rank: int, opening: Opening, first: Opening) -> None:
    """Hold what a rank asks for against what rank 0 does.

    Raises:
        StepConflictError: it is at another step. PublishError: it asks for something else than rank 0.
    """
    if opening.step != first.step:
        raise StepConflictError(
            f"rank {rank} publishes step {opening.step} and rank 0 step {first.step}: all ranks publish the same step"
        )
    for name in ("transport", "durable", "delta", "delta_rules"):
        mine, its = getattr(opening, name), getattr(first, name)
        if mine != its:
            raise PublishError(
                f"rank {rank} asks for {name}={mine!r} and rank 0 for {its!r}: all ranks ask for the same"
            )
