"""What the engines of this host are to serve: as the upstream lists it, or as a hub orders it that leads this host.

A host is *led* from the first order on, or from the answer to a report that says so, until the upstream answers that it
does not lead it. That is written down: a host that was led goes to nothing newer by itself, also after a restart and
while its hub is gone. It serves on, and pulls what is sealed.

Orders are counted. One that says after how many it was made is refused where others were obeyed since: the network has
kept it while its hub ordered something else.

A host that has heard no answer to its reports since its start waits for one, at most `FIRST_WORD_SECONDS` from when its
hub could be heard, before it goes to something newer by itself: its hub may have begun to lead it.
"""

from dataclasses import replace

from refitd.policy.hosts import is_late, overtaken, refusal_of
from refitd.policy.pulls import is_held_back
from refitd.rollout.targets import Targets
from refitd.state.observer import Notifier
from refitd.state.records import UNLED, HostLead, RunRecord
from refitd.state.store import Store
from refitd_client.contract.follow import HostOrder, ReportAnswer
from refitd_client.contract.states import VersionState

FIRST_WORD_SECONDS = 30.0


class OrderRefusedError(Exception):
    """An order that is not obeyed: from another hub, or by an older lead. The message is a sentence."""


class OrderOvertakenError(OrderRefusedError):
    """An order that is not obeyed because another was obeyed since it was made."""


class Orders:
    """The orders of one host. `wake` is notified when there is something new to pull."""

    def __init__(self, store: Store, targets: Targets, wake: Notifier, *, run: str | None) -> None:
        """Change nothing yet.

        Args:
            store: what the service knows.
            targets: what engines are to serve; hears of orders.
            wake: notified when another version is wanted.
            run: the run to follow; None for the only one.
        """
        self._store = store
        self._targets = targets
        self._wake = wake
        self._expected = ""
        self._is_led: bool | None = None  # what was said since the start
        self._waits_until: float | None = None  # None until the upstream is heard
        self.run = run

    @property
    def lead(self) -> HostLead:
        """Which order was the newest, and from whom, as it is written down."""
        return max(
            self._store.runs.leads.values(), key=lambda lead: (lead.leads, lead.orders, lead.fence), default=UNLED
        )

    @property
    def is_led(self) -> bool:
        """Whether a hub orders what is served here, as far as is known."""
        return self.lead.leads if self._is_led is None else self._is_led

    @property
    def is_untold(self) -> bool:
        """Whether the upstream may yet say that it leads this host: it has answered no report since the start."""
        has_waited = self._waits_until is not None and self._store.clock.monotonic() >= self._waits_until
        return self._is_led is None and not has_waited

    def heard(self) -> None:
        """The upstream has said what versions it has: an answer to a report is waited for from now on."""
        if self._waits_until is None:
            self._waits_until = self._store.clock.monotonic() + FIRST_WORD_SECONDS

    def unanswered(self) -> None:
        """The upstream takes no reports, so it leads no host."""
        self._waits_until = 0.0

    def answered(self, run: str | None, answer: ReportAnswer) -> None:
        """The upstream has answered a report about a run (None: none is known yet): it leads this host, or does not."""
        self._expected, before = answer.leader, None if self.is_untold else self.is_led
        self._is_led = answer.leads
        lead = self.lead
        if answer.leads and run is not None and not lead.leads:
            self._write(run, replace(lead, leads=True, leader=answer.leader), "a hub orders what is served here")
        for known, other in list(self._store.runs.leads.items()):
            if other.leads and not answer.leads:
                self._write(known, replace(other, leads=False), "no hub orders any more what is served here")
        if before is not answer.leads:
            self._wake.notify()

    def _write(self, run: str, lead: HostLead, text: str) -> None:
        self._store.put_order(replace(self._store.runs.record_of(run), lead=lead), text)

    def obey(self, order: HostOrder, upstream: str) -> None:
        """Have the engines of this host serve what a hub orders.

        Args:
            order: the order.
            upstream: what sentences call the hub that this host follows.

        Raises:
            OrderOvertakenError: another order was obeyed since it was made.
            OrderRefusedError: it comes from another hub, or from one that leads no more.
        """
        before = self.lead
        if (why := refusal_of(order, before, self._expected or before.leader, upstream)) is not None:
            raise OrderRefusedError(why)
        known = self._store.runs.record_of(order.run)
        is_desired = known.desired == order.version and known.lead == before
        if (why := overtaken(order, before, is_desired=is_desired)) is not None:
            raise OrderOvertakenError(why)
        lead = HostLead(
            leads=True,
            leader=order.leader or before.leader,
            fence=order.fence,
            told_by=order.told_by,
            orders=before.orders if is_late(order, before) else before.orders + 1,
        )
        self._is_led = True
        by = f"{order.told_by or 'a hub'} orders (with epoch {order.fence})"
        self._desire(replace(known, desired=order.version, lead=lead), by)

    def desire(self, run: str, version: str | None) -> bool:
        """The upstream wants this host to serve a version, of the run that it follows from now on. None: nothing but
        what it serves. Return whether that is new.
        """
        return self._desire(replace(self._store.runs.record_of(run), desired=version), "the upstream wants")

    def _desire(self, wanted: RunRecord, by: str) -> bool:
        """Write down what is wanted of a run, and by what lead, at once. Return whether it is another version."""
        self.run = wanted.run
        known, version = self._store.runs.record_of(wanted.run), wanted.desired
        if known != wanted:
            what = "nothing but what is served here" if version is None else f"{version} to be served here"
            self._store.put_order(wanted, f"{by} {what}")
        if known.desired == version:
            return False
        if version is None:
            self._targets.order(wanted.run, None)
        self.carry_out()
        self._wake.notify()
        return True

    async def run_forever(self) -> None:
        """Roll out what is wanted as soon as it is good here, until cancelled."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen)
            self.carry_out()

    def carry_out(self) -> None:
        """Have what is wanted rolled out, if it is good here.

        While the run is paused here, what is newer waits, and with it what was served here and then left: a pause
        brings engines to the newest that was served.
        """
        for run, desired in list(self._store.runs.desired.items()):
            record = self._store.versions.get(desired)
            if record is None or record.state is not VersionState.SEALED or record.barred:
                continue
            rollout, before = self._store.rollouts.get(run), self._store.runs.ordered.get(run)
            is_paused = rollout is not None and rollout.paused_since is not None
            if not is_paused or before is None or not is_held_back(desired, before):
                self._targets.order(run, desired)
