"""What the routes work with: the parts of the service; and which version or engine a request names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fastapi import Depends, Request

from refitd.api.auth import Credentials
from refitd.api.options import ApiValues
from refitd.catalog.intake import Intake
from refitd.observe.telemetry import Telemetry
from refitd.policy.readiness import unknown
from refitd.problem import ProblemError, Slug
from refitd.reclaim.sweep import Sweeper
from refitd.state.decisions import DecisionFile
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import listed
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets
from refitd_client.contract.naming import Order, parse_version_id
from refitd_client.contract.naming import version_id as id_of
from refitd_client.contract.wire import GroupLead


class Upstreams(Protocol):
    """What follows the upstreams of this service. They decide what would be undone here at the next look."""

    def decides_run(self, run: str) -> bool:
        """Whether the upstream decides where engines of a run go."""
        ...

    def decides_end(self, run: str) -> bool:
        """Whether the upstream decides when a run ends: it has not ended there."""
        ...

    def decides_pin(self, version: VersionRecord) -> bool:
        """Whether the upstream decides whether a version is pinned."""
        ...

    def decided_by(self, do: str) -> str:
        """Say who decides something, and to do it there."""
        ...


class Copies(Protocol):
    """The copies of deltas, for engines that cannot load deltas."""

    def why_waiting(self, version: VersionRecord) -> str | None:
        """What a delta waits for that no copy holds; None where it waits for nothing."""
        ...


class Hosts:
    """The hosts that follow this service. There are none, unless a ring takes their reports."""

    def of_run(self, run: str) -> list[str]:
        """The names of those that follow a run, or may."""
        return []

    def newest_unknown(self, run: str) -> str | None:
        """The id of the newest version of a run that hosts have and this service does not know, as after a loss of its
        root: its name is used up.
        """
        return None

    def why_they_stay(self, announced: VersionRecord) -> str | None:
        """What hosts have that is newer than a version which is announced, a sentence without a subject."""
        return None

    def leaves(self, goal: VersionRecord) -> dict[str, tuple[str, int]]:
        """What hosts have of a run that this service does not know, and that a rollback leaves: `RunRecord.left`."""
        return {}

    def note_refused(self, claim: Credentials, problem: ProblemError) -> None:
        """A request was refused for its token."""


@dataclass(slots=True, kw_only=True)
class Service:
    """The parts of the running service. Without `telemetry` only the API is measured. `hosts` are those that follow it.
    `follower` follows an upstream, None where it follows none. `leader` is this service as the leader of its group,
    None where it belongs to none. `decisions` writes what operators decide down a second time.
    """

    values: ApiValues
    store: Store
    targets: Targets
    intake: Intake
    fleet: Fleet
    sweeper: Sweeper
    copies: Copies | None = None
    telemetry: Telemetry | None = None
    hosts: Hosts = field(default_factory=Hosts)
    follower: Upstreams | None = None
    decisions: DecisionFile | None = None
    leader: GroupLead | None = None

    async def decided(self) -> None:
        """Wait until what was decided is durable; call it before a request for it is answered.

        Raises:
            JournalError: the journal cannot be written just now.
        """
        await (self.store.durable() if self.decisions is None else self.decisions.written())


async def _service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_service)]


def leave_to_upstream(service: Service, do: str, decides: Callable[[Upstreams], bool]) -> None:
    """Refuse what the upstream of this service would undo at the next look.

    Raises:
        ProblemError: the service follows an upstream that decides this.
    """
    if service.follower is not None and decides(service.follower):
        raise ProblemError(Slug.RUN_FOLLOWED, service.follower.decided_by(do))


async def find_version(service: Service, version_id: str) -> VersionRecord:
    """Return a version by its id, also one that was deleted.

    Raises:
        ProblemError: there is none, or the service cannot know yet.
    """
    record = await service.store.find(version_id)
    if record is None:
        lists = ": 'refitd versions' lists what there is"
        others = other_generations(version_id, service.store)
        known = f", but that step in another generation: {listed(others)}" if others else lists
        detail = f"no version {version_id}{known}"
        raise unknown(service.store, Slug.UNKNOWN_VERSION, detail)
    return record


def ids_of_step(word: str, store: Store, run: str | None = None) -> list[str]:
    """The ids of the versions of a step, or of a folder's name, the newest first.

    Versions that are deleted count where no other fits.
    """
    for ids in (store.versions, store.gone):
        parsed = ((id_, found) for id_ in ids if (found := parse_version_id(id_)) is not None)
        named = [
            (order, id_)
            for id_, (of_run, order) in parsed
            if run in {None, of_run} and word in {str(order.step), id_.rpartition("~")[2]}
        ]
        if named:
            return [id_ for _, id_ in sorted(named, reverse=True)]
    return []


def other_generations(version_id: str, store: Store) -> list[str]:
    """The ids of a run's versions of the same step in other generations, the newest first.

    Versions that are deleted count where there is no other.
    """
    if (asked := parse_version_id(version_id)) is None:
        return []
    run, order = asked
    first = id_of(run, Order(1, order.step))
    for ids in (store.versions, store.gone):
        same = [parse_version_id(id_) for id_ in ids if id_ == first or id_.startswith(f"{first}.")]
        if same:
            return [
                id_of(run, each) for each in sorted((found[1] for found in same if found is not None), reverse=True)
            ]
    return []


def engine_id_of(word: str, store: Store) -> str:
    """Return the id of the engine with this id or URL; the word itself where there is none."""
    if word in store.engines:
        return word
    url = word.rstrip("/")
    return next((engine.id for engine in store.engines.values() if engine.url.rstrip("/") == url), word)
