"""What is said of an engine that is a host: what it does, who does what for its engines, and what helps."""

from collections.abc import Iterator

from refitd.explain.hosts import HostWords
from refitd.state.records import AttemptRecord, EngineRecord
from refitd.state.store import Store
from refitd.text import capitalized
from refitd.update.targets import Targets
from refitd_client.contract.follow import HostEngine
from refitd_client.contract.states import EngineState
from refitd_hosts.policy.hosts import what_it_does, why_unknown
from refitd_hosts.policy.upstream import without_store


class Words(HostWords):
    def does(self, engine: EngineRecord, store: Store) -> str | None:
        if engine.state.is_away:
            return None
        order = store.loading.get(engine.id)

        def size(version: str) -> int | None:
            known = store.versions.get(version)
            return None if known is None else known.files.bytes

        return what_it_does(engine.seen.host, None if order is None else order.version, size)

    def shares_name(self, engine: EngineRecord) -> str | None:
        if engine.seen.host is None or engine.state.is_away or not engine.seen.host.shares_name:
            return None
        return f"two hosts report as {engine.id}: give each a name of its own (--follower)"

    def unknown(self, engine: EngineRecord, store: Store, targets: Targets) -> str | None:
        unknown = None if engine.seen.host is None or engine.state.is_away else engine.seen.host.unknown
        if unknown is None:
            return None
        target = None if engine.run is None else targets.of_run(engine.run).target
        return why_unknown(unknown, is_other=unknown in store.versions, target=None if target is None else target.id)

    def about(self, engine: EngineRecord, order: AttemptRecord | None, store: Store, targets: Targets) -> Iterator[str]:
        """As the host said last."""
        if (host := engine.seen.host) is None:
            return
        source = f" from {host.upstream}" if host.upstream else ""
        own = "engine" if host.count == 1 else f"{host.count} engines"
        counted = ", ".join(f"{count} {state}" for state, count in sorted(host.states.items()))
        yield f"The host {host.follower} pulls each version{source} and updates its own {own}."
        yield "This service only says which version, and waits until the host has proved that it serves it."
        if (does := self.does(engine, store)) is not None:
            yield f"Now the host {does}."
        yield from without_store(host.store_fault)
        yield f"When the host last reported, its engines were: {counted or 'none'}."
        goal = engine.serving if order is None else order.version
        late = [each for each in host.engines if each.state is not EngineState.IN_SYNC]
        for each in host.engines:
            if each in late or goal not in (None, each.version):
                yield _not_there(each, goal)
        not_named = host.count - host.states.get(EngineState.IN_SYNC, 0) - len(late)
        if not_named > 0:
            others = "1 more of its engines was" if not_named == 1 else f"{not_named} more of its engines were"
            yield f"{others} not IN_SYNC: 'refitd status' on that host names all of them."
        if (shared := self.shares_name(engine)) is not None:
            yield f"{capitalized(shared)}."
        if (has := self.unknown(engine, store, targets)) is not None:
            yield f"The host {has}."


def _not_there(each: HostEngine, goal: str | None) -> str:
    """Say where an engine of a host is instead, and why."""
    serves = f"it served {each.version or 'no version'}"
    if each.state is EngineState.IN_SYNC:
        return f"Its engine {each.id} was not on {goal} yet: {serves}, and the host had not begun to load it."
    why = f" ({each.reason})" if each.reason else ""
    if goal in (None, each.version):
        return f"Its engine {each.id} was {each.state}{why}; {serves}."
    return f"Its engine {each.id} was not on {goal} yet: it was {each.state}{why}, and {serves}."
