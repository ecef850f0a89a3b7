"""The object stores of --follow and --push: can they be reached, read and written, and do they keep conditions."""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from refitd.diagnose.doctor.finding import CheckName, Finding, failed, good, warning
from refitd.settings import Settings
from refitd_client.bucket.address import is_bucket_url
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.run import list_runs, require_conditions
from refitd_client.errors import BucketError

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
    """Try the stores that the settings name."""
    asked = [look_at_store(Bucket.at(url), pushes=False) for url in settings.follow if is_bucket_url(url)]
    if settings.push is not None:
        asked.append(look_at_store(Bucket.at(settings.push), pushes=True))
    return list(await asyncio.gather(*asked))


async def look_at_store(bucket: Bucket, *, pushes: bool) -> StoreAnswers:
    """Read the list of runs, and write and delete an object of this check's own."""
    runs: tuple[str, ...] = ()
    read: str | None = None
    write: str | None = None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            runs = await list_runs(bucket)
    except (BucketError, TimeoutError) as error:
        read = str(error) or f"{bucket.name} did not answer within {ANSWER_SECONDS:g} s"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if pushes:
                await require_conditions(bucket)
            else:
                key = f"probes/{secrets.token_hex(16)}"
                await bucket.write(key, b"1\n")
                await bucket.delete(key)
    except (BucketError, TimeoutError) as error:
        write = str(error) or f"{bucket.name} did not answer within {ANSWER_SECONDS:g} s"
    return StoreAnswers(name=bucket.name, pushes=pushes, runs=runs, read=read, write=write)


def judge_store(asked: StoreAnswers) -> Iterator[Finding]:
    """Judge what a store did."""
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
