"""A follower of the upstreams that the settings name: its parts, and how they are handed to each other."""

from collections.abc import Callable
from pathlib import Path

from refitd.state.store import Store
from refitd.update.fleet import Fleet
from refitd.update.targets import Targets
from refitd_client.bucket.objects import Bucket, is_bucket_url
from refitd_client.http.connection import Connection
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.follow.hub import HubUpstream
from refitd_hosts.follow.options import FollowSettings, check_upstream
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.upstream import FollowedSources, Upstream


def connect_upstream(url: str, *, token_file: Path | None) -> Upstream:
    """The upstream at a URL: a refitd, or an object store. The file has the bearer token for it."""
    check_upstream(url)
    if is_bucket_url(url):
        return BucketUpstream(Bucket.at(url))
    return HubUpstream(Connection(url=url.rstrip("/"), token_file=token_file))


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
    """What follows the upstreams of the settings, None where there are none. See `Puller` and `UpstreamFollower`."""
    if not settings.follow:
        return None
    sources = FollowedSources([connect_upstream(url, token_file=settings.follow_token_file) for url in settings.follow])
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
