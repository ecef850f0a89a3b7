"""Whether a notice contradicts what is known, and whether a checkpoint is still being written."""

from dataclasses import replace

import pytest

from refitd.policy.admit import FolderLook, NeverSettles, SeenFolder, Settling, StillWritten, admit, settle
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from support.records import version

NOTICE = Notice(run="run", step=7)
KNOWN = version(7)
GONE = version(7, state=VersionState.DELETED)
RULES = {"settle_for": 1.0, "timeout": 60.0}


def seen(**fields: str | bool | None) -> SeenFolder:
    defaults = {"path": KNOWN.path, "digest": KNOWN.digest, "signature": KNOWN.files.signature}
    return SeenFolder(order=Order(1, 7), **(defaults | fields))  # pyright: ignore[reportArgumentType]


def test_a_notice_that_agrees_with_what_is_known_is_no_conflict() -> None:
    assert admit(NOTICE, seen(), None) is None
    assert admit(NOTICE, seen(), KNOWN) is None
    assert admit(replace(NOTICE, digest=KNOWN.digest), seen(), None) is None
    # Files without a manifest are read again before they count as others.
    assert admit(NOTICE, seen(digest=None, signature="other"), KNOWN) is None
    # It is repeated after the version was collected.
    assert admit(NOTICE, seen(signature="", digest=None, there=False), GONE) is None
    assert admit(replace(NOTICE, digest=GONE.digest), seen(there=False), GONE) is None


def test_one_step_with_two_contents_paths_or_kinds_is_a_conflict_that_says_what_to_do() -> None:
    assert "publish the next step" in (admit(NOTICE, seen(digest="other"), KNOWN) or "")
    assert admit(NOTICE, seen(path="run/elsewhere"), KNOWN)
    assert admit(replace(NOTICE, kind=Kind.DELTA), seen(), KNOWN)
    assert admit(replace(NOTICE, digest="other"), seen(), None)


@pytest.mark.parametrize("digest", [KNOWN.digest, "other"])
def test_files_where_a_version_was_collected_are_a_conflict_and_not_that_version(digest: str) -> None:
    assert "opens a new generation" in (admit(NOTICE, seen(digest=digest), GONE) or "")


@pytest.mark.parametrize("state", [VersionState.SEALED, VersionState.LOST, VersionState.RETIRED, VersionState.DELETED])
@pytest.mark.parametrize("there", [True, False])
def test_what_was_published_with_another_digest_is_never_the_version_that_is_known(
    state: VersionState, there: bool
) -> None:
    assert admit(replace(NOTICE, digest="other"), seen(there=there), version(7, state=state))


def look(signature: str = "s", *, final: bool = False, fault: str | None = None) -> FolderLook:
    return FolderLook(signature=signature, final=final, fault=fault)


def test_a_checkpoint_is_complete_by_its_manifest_by_its_notice_or_when_nothing_changes_for_a_while() -> None:
    assert settle(look(final=True), None, 0.0, **RULES) is None
    assert settle(look(), None, 0.0, settle_for=0.0, timeout=60.0) is None
    first = settle(look(), None, 10.0, **RULES)
    assert isinstance(first, StillWritten)
    assert first.until == 11.0
    grown = settle(look("larger"), first.memory, 10.9, **RULES)
    assert isinstance(grown, StillWritten)
    assert grown.memory == Settling(signature="larger", since=10.9)
    assert settle(look(), first.memory, 11.0, **RULES) is None


def test_a_shard_that_comes_late_is_waited_for_and_not_for_ever() -> None:
    found = settle(look(fault="shard 2 is missing"), None, 5.0, **RULES)
    assert isinstance(found, StillWritten)
    assert found.reason == "incomplete: shard 2 is missing; rejected when nothing has changed for 60 s"
    found = settle(look(fault="shard 2 is missing"), Settling(signature="s", since=0.0), 60.0, **RULES)
    assert isinstance(found, NeverSettles)
    assert "shard 2 is missing" in found.reason


def test_what_a_trainer_writes_last_is_waited_for_as_long_as_it_takes() -> None:
    waits = replace(look(), awaits="STABLE is not there")
    found = settle(waits, Settling(signature="s", since=0.0), 10_000.0, **RULES)
    assert isinstance(found, StillWritten)
    assert (found.reason, found.until) == ("STABLE is not there", 10_010.0)
