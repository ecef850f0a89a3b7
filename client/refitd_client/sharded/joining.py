"""How the ranks open a publisher together: each prepares, rank 0 takes the run, and all raise what fails on one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from refitd_client.sharded.agreement import succeeded
from refitd_client.sharded.alike import RankSettings, require_same_settings
from refitd_client.sharded.lead import Lead, refuse
from refitd_client.sharded.rank_group import FailedReply, RankGroup, RefusedOutcome, portable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRank:
    """A rank that could open its publisher. `take` takes the run; rank 0 alone calls it."""

    settings: RankSettings
    take: Callable[[], Lead]


def join(group: RankGroup, prepare: Callable[[], PreparedRank]) -> Lead | None:
    """Prepare each rank, and take the run on rank 0.

    Returns:
        Rank 0's part, on rank 0.

    Raises:
        PublishError: ranks were opened with different settings, or rank 0 cannot take the run.
        RankLostError: a rank is gone, or did not come.
        Exception: what one rank's `prepare` raised, on every rank.
    """
    if group.rank != 0:
        group.tell(_attempted(lambda: prepare().settings))
        if isinstance(answer := group.hear(), RefusedOutcome):
            raise answer.error
        return None
    ready = _attempted(prepare)
    try:
        prepared, *others = succeeded(group.hear_all(ready, "open its publisher"))
        require_same_settings([prepared.settings, *others])
        lead = prepared.take()
    except Exception as error:
        refuse(group, error)
        raise
    group.tell_all([None] * group.size)
    return lead


def _attempted(prepare: Callable[[], T]) -> T | FailedReply:
    """What `prepare` returns; why it does not, as rank 0 is told of arguments that cannot be."""
    try:
        return prepare()
    except Exception as error:
        return FailedReply(error=portable(error), is_argument=True)
