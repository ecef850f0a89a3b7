"""A follower of the upstreams that the settings name: its parts, and how they are handed to each other."""

from collections.abc import Callable
from pathlib import Path

from refitd.state.store import Store
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets
from refitd_hosts.follow.connecting import connect_upstream
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.follow.options import FollowSettings
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.sources import FollowedSources


def compose_follower(
    settings: FollowSettings,
    store: Store,
    targets: Targets,
    fleet: Fleet,
    *,
    root: Path,
    guard: Callable[[], str | None],
    run: str | None,
    quorum: int,
    nudge: Callable[[], None],
    port: int,
) -> UpstreamFollower | None:
    """What follows the upstreams of the settings, None where there are none.

    Args:
        settings: name the upstreams, and this follower.
        store: what the service knows.
        targets: what engines are to serve.
        fleet: the engines.
        root: what is pulled into.
        guard: says why what is at the root's path is not the root, None where it is.
        run: the run to follow; None for the only one.
        quorum: engines that must serve a version before it counts as served.
        nudge: has the catalog scan soon.
        port: the one that this service listens on.
    """
    if not settings.follow:
        return None
    upstreams = [connect_upstream(url, token_file=settings.follow_token_file) for url in settings.follow]
    sources = FollowedSources(upstreams)
    return UpstreamFollower(
        store,
        targets,
        fleet,
        Puller(root.resolve(), sources, guard=guard),
        sources,
        identity=settings.identity(port),
        run=run,
        nudge=nudge,
        quorum=quorum,
        freely=settings.follow_freely,
    )
