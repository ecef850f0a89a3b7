"""Routes of following: a follower's reports at its upstream, and what a follower says of itself."""

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Query

from refitd.api.context import Service, ServiceOf
from refitd.follow.follower import UpstreamFollower
from refitd.follow.orders import OrderOvertakenError, OrderRefusedError
from refitd.problem import ProblemError, Slug
from refitd.state.followers import LEASE_SECONDS, TooManyFollowersError
from refitd_client.contract.follow import (
    MAX_REPORTED,
    FollowerReport,
    Following,
    HandedOut,
    HostOrder,
    HostTrial,
    HostTrialResult,
    Relay,
    Relays,
    ReportAnswer,
)
from refitd_client.contract.naming import InvalidNameError, check_run, parse_version_id
from refitd_client.contract.wire import Page

router = APIRouter(prefix="/v1", tags=["follow"])
MOST_SECONDS = 30.0  # that an answer is held back
_MAX_NAME = 200
_MAX_TEXT = 500


@router.put("/followers/{name}")
async def report(
    name: Annotated[str, Path(max_length=_MAX_NAME)], report: FollowerReport, service: ServiceOf
) -> ReportAnswer:
    """A follower says what it has and what it pulls. That is kept until the lease ends, or it says otherwise."""
    if report.follower != name:
        raise ProblemError(Slug.BAD_REQUEST, f"the report is {report.follower!a}'s, and the address names {name!a}")
    if max(len(report.holds), len(report.pulls), len(report.wrong), len(report.lost)) > MAX_REPORTED:
        raise ProblemError(Slug.BAD_REQUEST, f"each list of a report has at most {MAX_REPORTED} entries")
    texts = (report.url or "", report.zone, report.process, report.run or "", report.serves or "", *report.lost)
    if max(map(len, (*texts, *report.holds, *report.pulls, *report.wrong, *report.wrong.values()))) > _MAX_TEXT:
        raise ProblemError(Slug.BAD_REQUEST, f"each text of a report has at most {_MAX_TEXT} characters")
    try:
        if (told := service.followers.reported(report)) is not None:
            service.store.say("follower", name, told, is_fault=True)
    except TooManyFollowersError:
        raise ProblemError(Slug.TOO_MANY, "there are as many followers as one service takes") from None
    named: Mapping[str, tuple[Relay | None, ...]] = {} if service.relays is None else service.relays.answer(report)
    hosts = service.hosts
    if hosts is None:
        return ReportAnswer(lease_seconds=LEASE_SECONDS, relays=named)
    await hosts.reported(report)
    leads, leader = hosts.leads(report), hosts.leader
    return ReportAnswer(lease_seconds=LEASE_SECONDS, relays=named, leads=leads, leader=leader)


@router.get("/followers")
async def list_followers(service: ServiceOf) -> Page[FollowerReport]:
    """The followers that have reported within the last 30 seconds, each as it reported itself last."""
    return Page(items=[known.report for _, known in sorted(service.followers.known.items())])


@router.get("/relays")
async def relays(service: ServiceOf) -> Relays:
    """Who of the followers pulls from whom, and what this service itself has sent of which version."""
    return Relays(
        children=0 if service.relays is None else service.relays.children,
        followers=[] if service.relays is None else service.relays.shown(),
        handed_out=[_handed_out(service, version, count) for version, count in service.handed_out.bytes_of.items()],
    )


def _handed_out(service: Service, version: str, count: int) -> HandedOut:
    known = service.store.versions.get(version)
    size = None if known is None else known.bytes
    return HandedOut(version=version, bytes=count, copies=round(count / size, 2) if size else None)


@router.get("/follow")
async def following(service: ServiceOf, within: Annotated[float, Query(ge=0, le=MOST_SECONDS)] = 0.0) -> Following:
    """What this service follows, and how far it is. 404 where it follows no upstream.

    With `within` it answers once what it is to serve begins to be loaded, or is served or refused; at the latest after
    so many seconds.
    """
    follower = _follower(service)
    return await follower.settled(within) if within else follower.following()


@router.put("/follow/desired")
async def desire(order: HostOrder, service: ServiceOf) -> Following:
    """Have the engines of this host serve a version: the order of the hub that leads it.

    It is answered at once, when it is written down; `GET /v1/follow` says what comes of it. 409 where the order comes
    from another hub than the one that this host follows, or from one that leads no more: `fence` is the epoch of its
    lead, and a lower one than this host has seen is refused. 409 too where it comes late: this host has obeyed another
    order since it had obeyed `after`, and desires something else.
    """
    follower = _follower(service)
    try:
        check_run(order.run)
    except InvalidNameError as error:
        raise ProblemError(Slug.BAD_NAME, str(error)) from error
    parsed = parse_version_id(order.version or "")
    if order.version is not None and (parsed is None or parsed[0] != order.run):
        raise ProblemError(Slug.BAD_NAME, f"{order.version!a} is no version of run {order.run}")
    if max(map(len, (order.leader, order.told_by))) > _MAX_TEXT:
        raise ProblemError(Slug.BAD_REQUEST, f"each text of an order has at most {_MAX_TEXT} characters")
    try:
        follower.obey(order)
    except OrderOvertakenError as error:
        raise ProblemError(Slug.ORDER_OVERTAKEN, str(error)) from error
    except OrderRefusedError as error:
        raise ProblemError(Slug.ORDER_REFUSED, str(error)) from error
    for engine in service.store.engines_of(order.run) if order.again else ():
        service.fleet.resync(engine.id)
    await service.store.durable()
    return follower.following()


@router.post("/follow/trial")
async def trial(asked: HostTrial, service: ServiceOf) -> HostTrialResult:
    """Ask each engine of this host that serves the version with this label for a few tokens, as a rollout would."""
    follower = _follower(service)
    version = service.store.versions.get(follower.following().serves or "")
    if version is None or version.label != asked.label:
        serves = "no version" if version is None else f"{version.id} and not {asked.label!r}"
        return HostTrialResult(fault=f"the host is proved to serve {serves}")
    asked_of = [engine for engine in service.store.engines_of(version.run) if engine.serving == version.id]
    found = await asyncio.gather(*(service.fleet.trial(version, engine, lambda _: None) for engine in asked_of))
    faults = [f"engine {engine.id}: {fault}" for engine, fault in zip(asked_of, found, strict=True) if fault]
    return HostTrialResult(fault=faults[0] if faults else None)


def _follower(service: Service) -> UpstreamFollower:
    if service.follower is None:
        raise ProblemError(Slug.NOT_FOUND, "this service follows no upstream (refitd serve --follow URL)")
    return service.follower
