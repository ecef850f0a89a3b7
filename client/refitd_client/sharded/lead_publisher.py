"""The publisher that holds the run for all ranks."""

from typing import Any

from refitd_client.publish.publisher import WeightPublisher


class LeadPublisher(WeightPublisher):
    """Rank 0's, whose errors advise what the trainer can do: it has opened a `ShardedPublisher`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take a run, as a `WeightPublisher` does."""
        super().__init__(*args, **options)
        self._folder.opened_as = "ShardedPublisher"
