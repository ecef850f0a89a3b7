"""The parts of ring 3 in a service: hosts that report, upstreams, pushing, discovery, and the group."""

from pathlib import Path

import structlog

from refitd.composition import Composition, GroupPort
from refitd.root.ownership import StartRefusedError
from refitd.settings import Settings, group_of
from refitd.state.records import Source
from refitd_client.bucket.objects import Bucket
from refitd_client.contract.stores import is_bucket_url
from refitd_client.http.connection import Connection
from refitd_hosts.discovery import parse_place
from refitd_hosts.discovery.scout import Scout
from refitd_hosts.follow.bucket import BucketUpstream
from refitd_hosts.follow.follower import UpstreamFollower
from refitd_hosts.follow.hub import HubUpstream
from refitd_hosts.follow.options import FollowSettings, check_upstream
from refitd_hosts.follow.puller import Puller
from refitd_hosts.follow.upstream import FollowedSources, Upstream
from refitd_hosts.hub.hub import Hub
from refitd_hosts.hub.reported import ReportedHosts
from refitd_hosts.options import GroupSettings, PushSettings
from refitd_hosts.push.pusher import Pusher

log = structlog.get_logger("refitd")


async def compose(core: Composition) -> None:
    """Add the parts of this ring to a service."""
    led = ReportedHosts(core.store, core.store.clock, core.leads)
    hub = core.api.hosts = Hub(core.store, led)
    core.fleet.connect = led.connector(
        core.fleet.connect, root=core.settings.path_map or str(core.root), load_timeout=core.settings.load_timeout
    )
    led.tell, core.fleet.forget_host = core.fleet.reported, led.forget
    core.books.pulling = hub.in_use
    core.runs.append(led.run)
    if (pusher := _pusher(core)) is not None:
        core.books.pushing = lambda: pusher.uploading
        led.store_with = pusher.store_with
        core.runs.append(pusher.run)
    _discover(core)
    if (follower := _follower(core)) is not None:
        core.targets.follows = True
        core.collector.sweeper.recycle_nothing("a host pulls into new files")
        core.books.upstream = lambda: follower.needs
        core.intake.upstreams = group_of(core.settings, FollowSettings).follow
        core.api.follower = hub.follower = follower
        core.runs.append(follower.run)


def _discover(core: Composition) -> None:
    """Look for engines in the places of the settings. What they named before is forgotten where there are none."""
    places = [parse_place(text) for text in group_of(core.settings, GroupSettings).discover]
    found = [engine.url for engine in core.store.engines.values() if engine.naming.source is Source.DISCOVERED]
    core.fleet.discovers = bool(places)
    core.runs.append(Scout(places, found, core.fleet.discovered, core.store.clock).run)


def _pusher(core: Composition) -> Pusher | None:
    if (url := group_of(core.settings, PushSettings).push) is None:
        return None
    return Pusher(core.store, core.targets, core.root, Bucket.at(url), keep=core.settings.keep_last + 1)


def connect_upstream(url: str, *, token_file: Path | None) -> Upstream:
    """The upstream at a URL: a refitd, or an object store. The file has the bearer token for it."""
    check_upstream(url)
    if is_bucket_url(url):
        return BucketUpstream(Bucket.at(url))
    return HubUpstream(Connection(url=url.rstrip("/"), token_file=token_file))


def _follower(core: Composition) -> UpstreamFollower | None:
    settings, followed = core.settings, group_of(core.settings, FollowSettings)
    if not followed.follow:
        return None
    if not (settings.engines or settings.engines_file or core.fleet.discovers or core.store.engines):
        log.warning("this host has no engine", advice="name its engines: --engine URL, or 'refitd engines add URL'")
    upstreams = [connect_upstream(url, token_file=followed.follow_token_file) for url in followed.follow]
    sources = FollowedSources(upstreams)
    return UpstreamFollower(
        core.store,
        core.targets,
        core.fleet,
        Puller(core.root, sources, guard=core.guard),
        sources,
        identity=followed.identity(core.port),
        run=settings.run,
        nudge=core.catalog.nudge,
        quorum=settings.quorum,
        freely=followed.follow_freely,
        urls=followed.follow,
    )


def find_group(settings: Settings) -> GroupPort | None:
    """Return the group of the service.

    Raises:
        StartRefusedError: PostgreSQL's driver is missing.
    """
    database = group_of(settings, GroupSettings).database
    if database is None:
        return None
    try:
        # Here, because its driver is an extra.
        from refitd_hosts.group.standby import ServiceGroup
    except ImportError as error:
        why = f"--state {database.shown} needs PostgreSQL's driver ({error}): install refitd's extra postgres"
        raise StartRefusedError(why) from error
    return ServiceGroup(settings, database)
