"""`refitd collect`: it shows what would go, asks, and collects every run of a store."""

from pathlib import Path

import pytest

from refitd_client.bucket.collection import BucketCollection
from refitd_client.bucket.objects import Bucket
from refitd_client.bucket.pointer import LEASE_SECONDS
from support.buckets import NAME, RUN, ScriptedBucket, counted, nth, publish_folder, unreachable
from support.checkpoints import publish, tensors
from support.command_line import answer, refitd

V1, V2 = (f"exp~trial~v00000{step}" for step in (1, 2))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ScriptedBucket:
    """Two versions of one run, of which the first is retired and rested."""
    made = ScriptedBucket()
    monkeypatch.setattr(Bucket, "at", lambda url: made)
    run = publish_folder(made, publish(tmp_path, RUN, 1, tensors(1)), keep=1)
    publish_folder(made, publish(tmp_path, RUN, 2, tensors(2)), run=run)
    made.later = LEASE_SECONDS + 1
    return made


def test_it_says_what_would_go_and_deletes_it_when_that_is_agreed_to(bucket: ScriptedBucket) -> None:
    shown = refitd("collect", NAME, "--dry-run").stdout
    assert f"delete  {V1}" in shown
    assert f"keep    {V2}  it counts" in shown
    assert "1 version would be deleted, 0 later, 1 kept, of 1 run\n" in shown
    assert answer("collect", NAME, "--yes", kind=dict[str, BucketCollection]) == {RUN: BucketCollection(deleted=(V1,))}
    assert counted(bucket) == [V2]
    assert "0 versions deleted, 0 later, 1 kept" in refitd("collect", NAME, "--run", RUN, "--yes").stdout


def test_without_a_terminal_or_yes_nothing_is_deleted(bucket: ScriptedBucket) -> None:
    bucket.asked.clear()
    assert refitd("collect", NAME).exit_code == 2
    assert "delete" not in {method for method, _ in bucket.asked}


def test_what_is_no_store_or_no_run_is_said(bucket: ScriptedBucket) -> None:
    assert "s3://bucket/prefix" in refitd("collect", "/mnt/weights", "--yes").stderr
    assert "has no run 'other': it has exp/trial" in refitd("collect", NAME, "--run", "other", "--yes").stderr


def test_a_store_that_does_not_answer_fails_the_command(bucket: ScriptedBucket) -> None:
    bucket.before = nth(0, unreachable(), ("list",))
    bucket.asked.clear()
    failed = refitd("collect", NAME, "--yes")
    assert failed.exit_code == 1
    assert "could not be reached" in failed.stderr
    assert "delete" not in {method for method, _ in bucket.asked}
