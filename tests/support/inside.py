"""What is inside a publisher, for tests that have it hear or forget something."""

from refitd_client import WeightPublisher
from refitd_client.publisher import RunPublisher
from refitd_client.sharded.publisher import RankPublisher


def in_process(publisher: WeightPublisher) -> RunPublisher:
    """Of one process."""
    assert isinstance(publisher._publisher, RunPublisher)
    return publisher._publisher


def in_rank(publisher: WeightPublisher) -> RankPublisher:
    """Of one rank of several."""
    assert isinstance(publisher._publisher, RankPublisher)
    return publisher._publisher
