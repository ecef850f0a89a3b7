"""What the engines of this host are to serve: as the upstream lists it, or as the hub that leads this host replies.

A hub leads each host that follows it and does not decide for itself. Such a host goes to nothing newer by itself, also
after a restart and while its hub is gone. It serves on, and pulls what is sealed.
"""

from collections.abc import Collection
from dataclasses import replace

from refitd.state.observer import Notifier
from refitd.state.records import HostLead
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.contract.follow import HostReply
from refitd_client.contract.states import VersionState
from refitd_hosts.policy.hosts import (
    ANEW,
    ANOTHER,
    IT_GOES,
    is_other,
    not_known_there,
    refusal_of,
    standing_on,
    why_it_stays,
    why_lost,
    why_not_served,
)
from refitd_hosts.policy.pulls import is_held_back

LEADERS = 16  # whose epochs are remembered


class Orders:
    """The orders of one host. `wake` is notified when there is something new to pull. `refused` is why what the
    upstream said last was not obeyed, and `lost` that it wants nothing and does not know what engines here serve, in a
    sentence. `asked` is the version that it wanted last, obeyed or not. `run` is the run to follow, None for the only
    one. Sentences call the upstream by the name that each call gives.
    """

    def __init__(self, store: Store, targets: Targets, wake: Notifier, *, run: str | None) -> None:
        self._store, self._targets, self._wake = store, targets, wake
        self.run = run
        self.refused: str | None = None
        self.lost: str | None = None
        self.asked: str | None = None

    @property
    def lead(self) -> HostLead:
        return self._store.origin.lead

    def obey(self, reply: HostReply, upstream: str) -> str | None:
        """Have the engines of this host serve what a reply of the hub says that leads it. Return the run whose engines
        are to be loaded again though they serve the version; None where none is.
        """
        before, by = self.lead, reply.told_by or upstream
        self.refused = refusal_of(reply, before, upstream)
        if self.refused is not None:
            return None
        heard = {name: epoch for name, epoch in before.heard.items() if name != reply.leader}
        heard = dict([*heard.items(), (reply.leader, reply.epoch)][-LEADERS:])
        for run, version in reply.serve.items():
            digest = reply.digests.get(version or "")
            self.refused = self.refused or self._why_not(run, version, by, reply.knows.get(run, ""), digest)
        if self.refused is not None:
            if before.heard.get(reply.leader) != reply.epoch:  # its epoch ends earlier ones, whatever it says
                self._store.put_lead(replace(before, heard=heard), None)
            return None
        lead = HostLead(leader=reply.leader, told_by=reply.told_by, orders=reply.again or before.orders, heard=heard)
        if lead != before:  # also of a reply that orders nothing: an epoch ends the earlier ones
            is_other = (lead.leader, lead.fence) != (before.leader, before.fence)
            self._store.put_lead(lead, f"{by} leads this host" if is_other else None)
        for run, version in reply.serve.items():
            self._desire(run, version, f"{by} says")
        is_new = reply.again not in {0, before.orders}
        return next(iter(reply.serve), None) if is_new else None

    def hear(self, run: str | None, reply: HostReply, upstream: str) -> None:
        """Take what a hub knows of a run, which it may lead here or not."""
        is_wanted = run is None or run in reply.serve or run in self._store.runs.closed
        unknown = None if is_wanted or run is None else not_known_there(run, self.stands(run), reply.knows.get(run))
        self.lost = None if unknown is None else f"{reply.told_by or upstream} {why_lost(unknown)}"

    def desire(self, run: str, version: str, upstream: str, *, knows: str | None, digest: str | None) -> bool:
        """An upstream that does not lead this host wants it to serve a version, of the run that it follows from now on.
        Return whether that is new.

        Args:
            run: the version's.
            version: its id.
            knows: the id of the newest version of the run that it knows, "" for none; None where it may go back.
            digest: of the version's contents there, None where that is not known.
        """
        self.refused = self._why_not(run, version, upstream, knows, digest)
        return self.refused is None and self._desire(run, version, "the upstream wants")

    def _why_not(self, run: str, version: str | None, by: str, knows: str | None, digest: str | None) -> str | None:
        if version is None:
            return None
        here = self._store.versions.get(version)
        self.asked = version
        if here is not None and is_other(here, digest):
            return self._why_other(here, by, self.set_aside(here) or IT_GOES)
        why = why_not_served(version, self.stands(run), knows=knows)
        return None if why is None else f"{by} {why}"

    def follow_end(self, run: str, upstream: str, *, is_closed: bool) -> None:
        """Close a run that has ended at the upstream, and open it again where it goes on there: then this host keeps
        of it what the upstream keeps.
        """
        if is_closed:
            self._store.close_run(run)
        else:
            self._store.reopen_run(run, f"it is open at {upstream}")

    def make_way(self, versions: Collection[str], upstream: str) -> dict[str, str]:
        """Set aside versions of whose names the upstream has others. Return why those stay that do, by their ids."""
        known = [self._store.versions[version] for version in sorted(versions)]
        found = [(each, self.set_aside(each)) for each in known]
        return {each.id: self._why_other(each, upstream, why) for each, why in found if why is not None}

    def _why_other(self, here: VersionRecord, by: str, why: str) -> str:
        return f"{by} has another {here.id} than this host, of the same name: {why}"

    def set_aside(self, version: VersionRecord) -> str | None:
        """Retire a version of this host of whose name the upstream has another, with what stands on it. Return why it
        stays, and what helps, in a sentence; None where it goes.
        """
        store = self._store
        going = standing_on(version, store.versions_of(version.run))
        goals = self._targets.of_run(version.run)
        needed = {each.id for each in (goals.target, goals.wanted, goals.loadable, goals.last_good) if each is not None}
        needed |= {store.runs.ordered.get(version.run, ""), *(attempt.version for attempt in store.loading.values())}
        stays = why_it_stays(going, [*store.engines.values(), *store.removed.values()], needed)
        if stays is not None:
            return f"{stays}, and so goes nowhere. {ANEW}"
        for each in going:
            if each.state is not VersionState.RETIRED:
                store.forget_contents(each, ANOTHER)
        return None

    def stands(self, run: str) -> list[str | None]:
        """What engines here serve of a run, or were to serve."""
        return [self._store.runs.ordered.get(run), *(engine.serving for engine in self._store.engines_of(run))]

    def _desire(self, run: str, version: str | None, by: str) -> bool:
        """Write down what is wanted of a run, at once. Return whether it is another version."""
        self.run = run
        known = self._store.runs.record_of(run)
        if known.desired == version:
            return False
        what = "nothing but what is served here" if version is None else f"{version} is to be served here"
        self._store.put_order(replace(known, desired=version), f"{by}: {what}")
        if version is None:
            self._targets.order(run, None)
        self.carry_out()
        self._wake.notify()
        return True

    async def run_forever(self) -> None:
        """Have engines load what is wanted as soon as it is good here, until cancelled."""
        seen = -1
        while True:
            seen = await self._store.changed.wait_after(seen)
            self.carry_out()

    def carry_out(self) -> None:
        """Have engines load what is wanted, if it is good here.

        While the run is paused here, what is newer waits, and with it what was served here and then left: a pause
        brings engines to the newest that was served.
        """
        for run, desired in list(self._store.runs.desired.items()):
            record = self._store.versions.get(desired)
            if record is None or record.state is not VersionState.SEALED or record.barred:
                continue
            update, before = self._store.updates.get(run), self._store.runs.ordered.get(run)
            is_paused = update is not None and update.paused_since is not None
            if not is_paused or before is None or not is_held_back(desired, before):
                self._targets.order(run, desired)
