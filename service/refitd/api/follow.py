"""Routes of following: a follower's reports at its upstream, and what a follower says of itself."""

from typing import Annotated

from fastapi import APIRouter, Path

from refitd.api.context import ServiceOf
from refitd.problem import ProblemError, Slug
from refitd.state.followers import LEASE_SECONDS, TooManyFollowersError
from refitd_client.contract.follow import MAX_REPORTED, FollowerReport, Following, ReportAnswer
from refitd_client.contract.wire import Page

router = APIRouter(prefix="/v1", tags=["follow"])
_MAX_NAME = 200
_MAX_TEXT = 500


@router.put("/followers/{name}")
async def report(
    name: Annotated[str, Path(max_length=_MAX_NAME)], report: FollowerReport, service: ServiceOf
) -> ReportAnswer:
    """A follower says what it has and what it pulls. That is kept until the lease ends, or it says otherwise."""
    if report.follower != name:
        raise ProblemError(Slug.BAD_REQUEST, f"the report is {report.follower!a}'s, and the address names {name!a}")
    if max(len(report.holds), len(report.pulls), len(report.wrong)) > MAX_REPORTED:
        raise ProblemError(Slug.BAD_REQUEST, f"each list of a report has at most {MAX_REPORTED} entries")
    texts = (report.url or "", report.zone, report.run or "", report.serves or "", *report.holds, *report.pulls)
    if max(map(len, (*texts, *report.wrong, *report.wrong.values()))) > _MAX_TEXT:
        raise ProblemError(Slug.BAD_REQUEST, f"each text of a report has at most {_MAX_TEXT} characters")
    try:
        service.followers.reported(report)
    except TooManyFollowersError:
        raise ProblemError(Slug.TOO_MANY, "there are as many followers as one service takes") from None
    return ReportAnswer(lease_seconds=LEASE_SECONDS)


@router.get("/followers")
async def list_followers(service: ServiceOf) -> Page[FollowerReport]:
    """The followers that have reported within the last 30 seconds, each as it reported itself last."""
    return Page(items=[known.report for _, known in sorted(service.followers.known.items())])


@router.get("/follow")
async def following(service: ServiceOf) -> Following:
    """What this service follows, and how far it is. 404 where it follows no upstream."""
    if service.follower is None:
        raise ProblemError(Slug.NOT_FOUND, "this service follows no upstream (refitd serve --follow URL)")
    return service.follower.following()
