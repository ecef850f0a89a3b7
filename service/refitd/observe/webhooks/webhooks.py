"""Reporter and courier, put together as the settings say."""

import random
from pathlib import Path

from refitd.observe.telemetry import Telemetry
from refitd.observe.webhooks.delivery_task import Courier
from refitd.observe.webhooks.post import Post, SignedPost
from refitd.observe.webhooks.reporter import Reporter
from refitd.observe.webhooks.rules import WebhookRules
from refitd.rollout.targets import Targets
from refitd.state.store import Store


class Webhooks:
    """Listens to the store from here on. Without `--webhook` nothing is told, and what waited is given up."""

    def __init__(
        self, rules: WebhookRules, store: Store, targets: Targets, telemetry: Telemetry, post: Post | None = None
    ) -> None:
        """Read back what waits. Blocks; `post` stands in for the network."""
        self.courier = Courier(
            store.journal,
            store.clock,
            rules.receivers,
            post or SignedPost(rules.secret_file or Path("/nonexistent")),
            ended=telemetry.meters.delivery_ended,
            chance=random.Random(),  # noqa: S311 - jitter, not a secret
        )
        telemetry.meters.count_waiting(lambda: self.courier.waiting)
        self._reporter = Reporter(
            store,
            targets,
            telemetry.unserved,
            self.courier.tell,
            topics=rules.topics if rules.receivers else (),
            stalled_after=rules.stalled_after,
        )
        store.observe(self._reporter)

    async def run(self) -> None:
        """Send until cancelled."""
        await self.courier.run(self._reporter.look)
