"""Routes of following: hosts' reports at their upstream, and what a host says of itself."""

from dataclasses import replace
from typing import Annotated, Any, cast

import msgspec
from fastapi import APIRouter, Path, Request

from refitd.api.auth import FOLLOWS_BY
from refitd.api.context import Service, ServiceOf
from refitd.policy.hosts import newest_on_hosts, stands_of
from refitd.problem import ProblemError, Slug
from refitd.state.followers import LEASE_SECONDS, SupersededError, TooManyFollowersError
from refitd.state.store import Store
from refitd.update.hosts import NameTakenError
from refitd_client.contract.follow import MAX_REPORTED, Following, HostReply, HostReport
from refitd_client.contract.hosts import MAX_HOST_ENGINES
from refitd_client.contract.naming import InvalidNameError
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Page

router = APIRouter(prefix="/v1", tags=["follow"])
_MAX_NAME = 200
_MAX_TEXT = 500


@router.put("/hosts/{name}")
async def report(
    name: Annotated[str, Path(max_length=_MAX_NAME)], report: HostReport, service: ServiceOf, request: Request
) -> HostReply:
    """A host says what it is at, and is told what it is to serve. What it pulls is kept until the lease ends, or it
    says otherwise.

    A token that only follows speaks for the hosts that its line names, else for the one that it was used by first. 409
    where another process has reported by the name since, or an engine has it.
    """
    claim = request.scope.get(FOLLOWS_BY)
    if claim is not None and (why := service.names.refusal(claim, name)) is not None:
        raise ProblemError(Slug.FORBIDDEN, why)
    return take_report(name, report, service)


def take_report(name: str, report: HostReport, service: Service) -> HostReply:
    """Take a report that may be made, and reply.

    Raises:
        ProblemError: it is not as it should be, or comes from a host whose name another has.
    """
    if report.told.follower != name:
        raise ProblemError(
            Slug.BAD_REQUEST, f"the report is {report.told.follower!a}'s, and the address names {name!a}"
        )
    if max(len(report.holds), len(report.pulls), len(report.told.upstreams)) > MAX_REPORTED:
        raise ProblemError(Slug.BAD_REQUEST, f"each list of a report has at most {MAX_REPORTED} entries")
    host = report.told.host
    if host is not None and (len(host.engines) > MAX_HOST_ENGINES or len(host.states) > len(EngineState)):
        raise ProblemError(Slug.BAD_REQUEST, f"a report names at most {MAX_HOST_ENGINES} engines")
    if _has_long_text(msgspec.to_builtins(report)):
        raise ProblemError(Slug.BAD_REQUEST, f"each text of a report has at most {_MAX_TEXT} characters")
    if service.follower is not None and service.follower.is_led and not report.freely:
        # It would say what its own hub says, later, and two that follow each other would wait for each other for ever.
        upstream = service.settings.follow[0]
        raise ProblemError(
            Slug.RUN_FOLLOWED,
            f"this service is led by {upstream} and leads no hosts: follow {upstream}, or start it "
            "with --follow-freely",
        )
    try:
        is_newest = service.followers.reported(report)
        reply = HostReply(lease_seconds=LEASE_SECONDS)
        if service.hosts is not None:
            reply = service.hosts.reported(report, is_newest=is_newest)
        return _with_what_is_known(reply, report.told, service.store)
    except TooManyFollowersError:
        raise ProblemError(Slug.TOO_MANY, "there are as many hosts as one service takes") from None
    except (SupersededError, NameTakenError) as error:
        service.store.say("follower", name, str(error), is_fault=True)
        raise ProblemError(Slug.HOST_NAME_TAKEN, str(error)) from error
    except InvalidNameError as error:
        raise ProblemError(Slug.BAD_NAME, str(error)) from error


def _with_what_is_known(reply: HostReply, told: Following, store: Store) -> HostReply:
    """A reply with what this service knows of what the host is to serve, and of the run that it follows."""
    runs = {*reply.serve, told.run}
    stands = stands_of(told)
    newest = {each: store.newest_known(each, told.follower, stands) for each in runs if each is not None}
    wanted = [store.versions.get(version or "") for version in reply.serve.values()]
    return replace(
        reply,
        knows={each: version for each, version in newest.items() if version is not None},
        digests={version.id: version.digest for version in wanted if version is not None and version.digest},
    )


def newest_elsewhere(run: str, service: Service) -> str | None:
    """The id of the newest version of a run that hosts have and this service does not know, as after a loss of its
    root: its name is used up.
    """
    store = service.store
    reports = (known.report for known in service.followers.known.values())
    return newest_on_hosts(run, reports, lambda version: version in store.versions or version in store.gone)


def _has_long_text(value: Any) -> bool:
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            if len(each) > _MAX_TEXT:
                return True
        elif isinstance(each, dict):
            left.extend(cast("dict[str, Any]", each))
            left.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list | tuple):
            left.extend(cast("list[Any]", each))
    return False


@router.get("/hosts")
async def list_hosts(service: ServiceOf) -> Page[HostReport]:
    """The hosts that have reported within the last 30 seconds, each as it reported itself last."""
    return Page(items=[known.report for _, known in sorted(service.followers.known.items())])


@router.get("/follow")
async def following(service: ServiceOf) -> Following:
    """What this service follows, and how far it is. 404 where it follows no upstream."""
    if service.follower is None:
        raise ProblemError(Slug.NOT_FOUND, "this service follows no upstream (refitd serve --follow URL)")
    return service.follower.following()
