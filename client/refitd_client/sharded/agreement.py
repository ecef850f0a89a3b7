"""What all ranks agree on before a publication: who holds what, and so where it lies in the version's files. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from refitd_client.errors import StepConflictError
from refitd_client.publish.options import PublishOptions
from refitd_client.sharded.alike import require_alike
from refitd_client.sharded.holdings import compare_samples
from refitd_client.sharded.layout import Claim, ShardedLayout, lay_out
from refitd_client.sharded.rank_errors import argument_error_of_rank, error_of_rank
from refitd_client.sharded.rank_group import FailedReply, Opening


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedLayout:
    """The layout that was last agreed on, its number, and the claims that it was made from."""

    number: int
    claims: list[list[Claim]]
    layout: ShardedLayout


def agree(
    openings: Sequence[Opening | FailedReply],
    last: AgreedLayout | None,
    options: PublishOptions,
    inventory: Callable[[], frozenset[str] | None],
) -> AgreedLayout:
    """Make the layout of what all ranks hold, or take the last one if nothing has changed.

    Args:
        openings: the ranks', by rank.
        last: the layout that was last agreed on.
        options: rank 0's publisher's.
        inventory: returns the names in the base model's checkpoint, None if there is none.

    Raises:
        StepConflictError: ranks are at different steps.
        InvalidWeightsError: what they hold is no version.
        PublishError: a rank could not begin, or asks for something else than rank 0.
        TypeError, ValueError: a rank was called with arguments that cannot be.
    """
    opened: list[Opening] = succeeded(openings)
    claims: list[list[Claim]] = []
    for rank, opening in enumerate(opened):
        require_alike(rank, opening, opened[0])
        if opening.claims is not None:
            claims.append(opening.claims)
        elif last is not None and last.number == opening.layout:
            claims.append(last.claims[rank])
        else:
            raise StepConflictError(f"rank {rank} refers to an earlier publication that rank 0 knows nothing of")
    if last is None or claims != last.claims:
        layout = lay_out(
            claims,
            inventory=inventory,
            max_shard_bytes=options.max_shard_bytes,
            check_finite=options.check_finite,
        )
        last = AgreedLayout(number=1 if last is None else last.number + 1, claims=claims, layout=layout)
    difference = compare_samples([opening.samples for opening in opened], last.layout.shared)
    if difference is not None:
        raise difference
    return last


def succeeded(answers: Sequence[Any]) -> list[Any]:
    """The answers of all ranks. Raises the error of the first rank that failed."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, FailedReply):
            told = argument_error_of_rank if answer.is_argument else error_of_rank
            raise told(rank, answer.error) from answer.error
    return list(answers)
