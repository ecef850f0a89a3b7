"""Reporter and courier, put together as the settings say."""

import random
from pathlib import Path

from refitd.ledger import Ledger
from refitd.settings import Settings
from refitd.telemetry.telemetry import Telemetry
from refitd.webhooks.courier import Courier
from refitd.webhooks.post import Post, SignedPost
from refitd.webhooks.reporter import Reporter


class Webhooks:
    """Listens to the ledger from here on. Without `--webhook` nothing is told, and what waited is given up."""

    def __init__(self, settings: Settings, ledger: Ledger, telemetry: Telemetry, post: Post | None = None) -> None:
        """Read back what waits. Blocks; `post` stands in for the network."""
        receivers = settings.receivers
        self.courier = Courier(
            ledger.journal,
            ledger.clock,
            receivers,
            post or SignedPost(settings.webhook_secret_file or Path("/nonexistent")),
            ended=telemetry.meters.delivery_ended,
            chance=random.Random(),  # noqa: S311 - jitter, not a secret
        )
        telemetry.meters.count_waiting(lambda: self.courier.waiting)
        self._reporter = Reporter(
            ledger,
            telemetry.unserved,
            self.courier.tell,
            topics=settings.webhook_events if receivers else (),
            stalled_after=settings.stalled_after,
        )
        ledger.witnesses.append(self._reporter)

    async def run(self) -> None:
        """Send until cancelled."""
        await self.courier.run(self._reporter.look)
