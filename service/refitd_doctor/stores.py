"""What --follow and --push name: object stores and hubs.

Object stores: can they be reached, read and written, and do they keep conditions. A hub: does it answer, does it take
the follower's token, and has it the run. It is asked what a follower asks first, and sent a report that names nothing,
which it refuses as incomplete once it has looked at the token: nothing of that stays there.
"""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from refitd.engine.http import OVERVIEW_BYTES, NoReply, Reply, Transport
from refitd.settings import Settings, group_of
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.run import list_runs, require_conditions
from refitd_client.contract.stores import is_bucket_url
from refitd_client.contract.wire import Overview
from refitd_client.errors import BucketError
from refitd_doctor.finding import CheckName, Finding, failed, good, unknown, warning
from refitd_doctor.service import SERVICE_SECONDS
from refitd_hosts.follow.options import FollowSettings
from refitd_hosts.options import PushSettings

ANSWER_SECONDS = 15.0
_CHECK_STORE = (
    "check the bucket's name, the variables for the store (AWS_ENDPOINT_URL, AWS_REGION, AZURE_STORAGE_ACCOUNT_NAME "
    "and so on) and what these credentials may do"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswers:
    """What a store did. `runs` are those in it; `read` and `write` are why it could not be read or written."""

    name: str
    pushes: bool
    runs: tuple[str, ...] = ()
    read: str | None = None
    write: str | None = None


async def ask_stores(settings: Settings) -> list[StoreAnswers]:
    asked = [
        look_at_store(Bucket.at(url), pushes=False)
        for url in group_of(settings, FollowSettings).follow
        if is_bucket_url(url)
    ]
    if (push := group_of(settings, PushSettings).push) is not None:
        asked.append(look_at_store(Bucket.at(push), pushes=True))
    return list(await asyncio.gather(*asked))


async def look_at_store(bucket: Bucket, *, pushes: bool) -> StoreAnswers:
    """Read the list of runs, and write and delete an object of this check's own."""
    runs: list[str] = []

    async def read() -> None:
        runs.extend(await list_runs(bucket))

    async def write() -> None:
        if pushes:
            await require_conditions(bucket)
        else:
            key = f"probes/{secrets.token_hex(16)}"
            await bucket.write(key, b"1\n")
            await bucket.delete(key)

    async def why_not(do: Callable[[], Awaitable[None]]) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await do()
        except (BucketError, TimeoutError) as error:
            return str(error) or f"{bucket.name} did not answer within {ANSWER_SECONDS:g} s"
        return None

    return StoreAnswers(
        name=bucket.name, pushes=pushes, read=await why_not(read), runs=tuple(runs), write=await why_not(write)
    )


def judge_store(asked: StoreAnswers) -> Iterator[Finding]:
    if asked.read is not None:
        yield failed(CheckName.STORE, asked.name, asked.read, _CHECK_STORE)
    elif not asked.pushes and not asked.runs:
        yield warning(CheckName.STORE, asked.name, "it can be read, and holds no run", "publish into it, or push to it")
    else:
        runs = "1 run" if len(asked.runs) == 1 else f"{len(asked.runs)} runs"
        yield good(CheckName.STORE, asked.name, f"it can be read, and holds {runs}")
    if asked.write is None:
        text = "it can be written, and keeps conditions of writes" if asked.pushes else "it can be written"
        yield good(CheckName.STORE, asked.name, text)
    elif asked.pushes:
        yield failed(CheckName.STORE, asked.name, asked.write, _CHECK_STORE)
    else:  # it can pull; its leases are missing
        fix = "let it write below followers/: its notes keep what it pulls from being collected"
        yield warning(CheckName.STORE, asked.name, asked.write, fix)


_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_REPORT = "/v1/hosts/doctor"
_LET_IN = "give --follow-token-file a token of its --followers-token-file: followers are refused without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAnswers:
    """What a hub has answered: to the look that a follower begins with, and to a report without content.

    `proxy` is the variable of the environment that names a proxy, which is not asked; None where none does.
    """

    url: str
    look: Reply | NoReply
    report: Reply | NoReply
    proxy: str | None = None


async def ask_hubs(settings: Settings) -> list[HubAnswers]:
    urls = [url.rstrip("/") for url in group_of(settings, FollowSettings).follow if not is_bucket_url(url)]
    return list(await asyncio.gather(*(_ask(url, settings) for url in urls)))


async def _ask(url: str, settings: Settings) -> HubAnswers:
    hub = Transport(url, api_key=group_of(settings, FollowSettings).follow_token_file, admin_key=None, server="hub")
    look = await hub.get("/v1/overview", SERVICE_SECONDS, most=OVERVIEW_BYTES)
    proxy = next((name for name in _PROXIES if os.environ.get(name) or os.environ.get(name.lower())), None)
    return HubAnswers(url=url, look=look, report=await hub.put(_REPORT, {}, SERVICE_SECONDS), proxy=proxy)


def judge_hub(asked: HubAnswers, run: str | None) -> Iterator[Finding]:
    check, url, look, report = CheckName.UPSTREAM, asked.url, asked.look, asked.report
    if isinstance(look, NoReply):
        fix = "start it, or correct --follow: this host serves on what it has, and gets nothing new"
        if asked.proxy is not None:
            fix = f"{fix}. It is called directly, whatever {asked.proxy} says"
        yield failed(check, url, f"the hub does not answer: {look.reason}", fix)
        return
    if look.is_unauthorised:
        yield failed(check, url, f"the hub does not take this token for following ({look.status})", _LET_IN)
        return
    try:
        overview = look.read_as(Overview) if look.ok else None
    except msgspec.ValidationError:
        overview = None
    if overview is None:
        text = f"{url}/v1/overview was answered with {look.status}, and not as a hub does"
        yield unknown(check, url, text, "is this a refitd, and does it lead its group? Else correct --follow")
        return
    if isinstance(report, Reply) and report.is_unauthorised:
        text = f"the hub answers, and does not take this token for a follower's reports ({report.status})"
        yield failed(check, url, text, _LET_IN)
    elif isinstance(report, Reply) and report.is_incomplete:
        yield good(check, url, "the hub answers, and takes this token, or none")
    else:
        what = report.reason if isinstance(report, NoReply) else f"it answered {report.status}"
        text = f"the hub answers, and whether it takes a follower's reports is not known: {what}"
        yield unknown(check, url, text, "run the same refitd here and there, and see its log")
    names = sorted(glance.run for glance in overview.runs if glance.closed_at is None or glance.run == run)
    yield _of_runs(url, names, run)


def _of_runs(url: str, names: Sequence[str], run: str | None) -> Finding:
    check = CheckName.UPSTREAM
    listed, waits = ", ".join(names), "until then nothing is pulled"
    if run is not None and run not in names:
        text = f"the hub has no run {run}: it has {listed or 'none'}"
        return warning(check, url, text, f"correct --run, or publish to that run: {waits}")
    if run is None and len(names) > 1:
        return failed(check, url, f"the hub has several runs: {listed}", "name one with --run")
    if not names:
        return warning(check, url, "the hub has no run yet", f"publish to the hub: {waits}")
    return good(check, url, f"the hub has the run to follow: {run or names[0]}")
