"""Whether a notice brings a new version."""

from refitd.notice.admit import Conflict, New, Same, Seen, admit
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from support.records import version

NOTICE = Notice(run="run", step=7)
KNOWN = version(7)


def seen(**fields: str | None) -> Seen:
    defaults = {"path": KNOWN.path, "digest": KNOWN.digest, "signature": KNOWN.signature}
    return Seen(order=Order(1, 7), **(defaults | fields))  # pyright: ignore[reportArgumentType]


def test_the_first_notice_is_new() -> None:
    assert admit(NOTICE, seen(), None) == New()


def test_one_notice_a_thousand_times_is_one_version() -> None:
    assert {type(admit(NOTICE, seen(), KNOWN)) for _ in range(1000)} == {Same}


def test_one_step_with_two_contents_is_a_conflict_that_says_what_to_do() -> None:
    found = admit(NOTICE, seen(digest="other"), KNOWN)
    assert isinstance(found, Conflict)
    assert "publish the next step" in found.reason


def test_a_rewritten_checkpoint_without_manifest_is_a_conflict() -> None:
    assert isinstance(admit(NOTICE, seen(digest=None, signature="other"), KNOWN), Conflict)


def test_another_directory_for_the_same_step_is_a_conflict() -> None:
    assert isinstance(admit(NOTICE, seen(path="run/elsewhere"), KNOWN), Conflict)


def test_another_kind_for_the_same_step_is_a_conflict() -> None:
    assert isinstance(admit(Notice(run="run", step=7, kind=Kind.DELTA), seen(), KNOWN), Conflict)


def test_a_notice_that_is_repeated_after_the_version_was_collected_is_the_same() -> None:
    gone = version(7, state=VersionState.DELETED)
    assert admit(NOTICE, seen(signature="", digest=None), gone) == Same(gone)
