"""Doctor tries an object store: can it be read and written, and does it keep conditions of writes."""

import asyncio

import pytest

from refitd_client.bucket.objects import ObjectTag
from refitd_client.bucket.run import BucketRun
from refitd_doctor.finding import CheckVerdict, Finding
from refitd_doctor.stores import judge_store, look_at_store
from support.buckets import RUN, ScriptedBucket, keys, nth, unreachable


def found(bucket: ScriptedBucket, *, pushes: bool) -> list[Finding]:
    return list(judge_store(asyncio.run(look_at_store(bucket, pushes=pushes))))


def verdicts(findings: list[Finding]) -> list[CheckVerdict]:
    return [finding.verdict for finding in findings]


@pytest.mark.parametrize("pushes", [True, False])
def test_a_store_that_does_all_is_good_and_stays_as_it_was(pushes: bool) -> None:
    bucket = ScriptedBucket()
    asyncio.run(BucketRun(bucket, RUN, keep=1).begin())
    before = keys(bucket)
    findings = found(bucket, pushes=pushes)
    assert verdicts(findings) == [CheckVerdict.OK, CheckVerdict.OK]
    assert findings[0].text == "it can be read, and holds 1 run"
    assert keys(bucket) == before


def test_a_store_without_conditions_cannot_be_pushed_to() -> None:
    class Careless(ScriptedBucket):
        async def write_new(self, key: str, data: bytes) -> ObjectTag | None:
            return await self.write(key, data)

    findings = found(Careless(), pushes=True)
    assert findings[-1].verdict is CheckVerdict.FAILED
    assert "does not keep conditions" in findings[-1].text


def test_a_store_that_is_not_there_is_named() -> None:
    bucket = ScriptedBucket()

    def gone(method: str, key: str) -> None:
        raise unreachable()

    bucket.before = gone
    findings = found(bucket, pushes=True)
    assert verdicts(findings) == [CheckVerdict.FAILED, CheckVerdict.FAILED]
    assert all("could not be reached" in finding.text for finding in findings)


def test_a_follower_that_cannot_write_its_notes_is_warned() -> None:
    bucket = ScriptedBucket()
    bucket.before = nth(0, unreachable(), ("write",))
    findings = found(bucket, pushes=False)
    assert verdicts(findings) == [CheckVerdict.WARNING, CheckVerdict.WARNING]
    assert "notes" in str(findings[-1].fix)
