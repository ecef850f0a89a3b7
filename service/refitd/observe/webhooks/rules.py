"""What the settings say about webhooks. Commands that only read the settings import this, and no store."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from refitd.observe.webhooks.news import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRules:
    """Who is told of what.

    Attributes:
        receivers: URLs.
        secret_file: the file with the secrets that requests are signed by; None where there are no receivers.
        topics: what is told.
        stalled_after: seconds after which a rollout that has not ended is news.
    """

    receivers: Sequence[str] = ()
    secret_file: Path | None = None
    topics: Sequence[Topic] = ()
    stalled_after: float
