"""Whether a notice brings a new version."""

from dataclasses import replace

import pytest

from refitd.policy.admit import New, NoticeConflict, Same, SeenFolder, admit
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from support.records import version

NOTICE = Notice(run="run", step=7)
KNOWN = version(7)


def seen(**fields: str | bool | None) -> SeenFolder:
    defaults = {"path": KNOWN.path, "digest": KNOWN.digest, "signature": KNOWN.files.signature}
    return SeenFolder(order=Order(1, 7), **(defaults | fields))  # pyright: ignore[reportArgumentType]


def test_the_first_notice_is_new() -> None:
    assert admit(NOTICE, seen(), None) == New()


def test_one_notice_a_thousand_times_is_one_version() -> None:
    assert {type(admit(NOTICE, seen(), KNOWN)) for _ in range(1000)} == {Same}


def test_one_step_with_two_contents_is_a_conflict_that_says_what_to_do() -> None:
    found = admit(NOTICE, seen(digest="other"), KNOWN)
    assert isinstance(found, NoticeConflict)
    assert "publish the next step" in found.reason


def test_files_without_a_manifest_that_look_otherwise_are_no_conflict_before_they_are_read_again() -> None:
    assert admit(NOTICE, seen(digest=None, signature="other"), KNOWN) == Same(KNOWN)


def test_another_directory_for_the_same_step_is_a_conflict() -> None:
    assert isinstance(admit(NOTICE, seen(path="run/elsewhere"), KNOWN), NoticeConflict)


def test_another_kind_for_the_same_step_is_a_conflict() -> None:
    assert isinstance(admit(Notice(run="run", step=7, kind=Kind.DELTA), seen(), KNOWN), NoticeConflict)


def test_a_notice_that_is_repeated_after_the_version_was_collected_is_the_same() -> None:
    gone = version(7, state=VersionState.DELETED)
    assert admit(NOTICE, seen(signature="", digest=None, there=False), gone) == Same(gone)
    assert admit(replace(NOTICE, digest=gone.digest), seen(there=False), gone) == Same(gone)


@pytest.mark.parametrize("digest", [KNOWN.digest, "other"])
def test_files_where_a_version_was_collected_are_a_conflict_and_not_that_version(digest: str) -> None:
    found = admit(NOTICE, seen(digest=digest), version(7, state=VersionState.DELETED))
    assert isinstance(found, NoticeConflict)
    assert "opens a new generation" in found.reason


@pytest.mark.parametrize("state", [VersionState.SEALED, VersionState.LOST, VersionState.RETIRED, VersionState.DELETED])
@pytest.mark.parametrize("there", [True, False])
def test_what_was_published_with_another_digest_is_never_the_version_that_is_known(
    state: VersionState, there: bool
) -> None:
    known = version(7, state=state)
    assert isinstance(admit(replace(NOTICE, digest="other"), seen(there=there), known), NoticeConflict)


def test_what_lies_in_the_root_and_was_not_published_there_is_not_taken_for_it() -> None:
    assert isinstance(admit(replace(NOTICE, digest="other"), seen(), None), NoticeConflict)
    assert admit(replace(NOTICE, digest=KNOWN.digest), seen(), None) == New()
