"""A pointer names whole chains, goes forward alone, and nothing is collected that a lease names."""

from dataclasses import replace

import pytest

from refitd_client.bucket.pointer import (
    LEASE_SECONDS,
    MAX_LEASE_SECONDS,
    UPLOAD_SECONDS,
    BucketVersion,
    FollowerNote,
    Pointer,
    PointerRefusedError,
    advanced,
    is_dead,
    kept,
    lease_of,
    parse_pointer,
    parse_runs,
    parse_upload,
)
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import Kind

RUN = "exp/trial"


def id_of(step: int) -> str:
    return version_id(RUN, Order(1, step))


def version(step: int, base: int | None = None, *, pinned: bool = False, barred: bool = False) -> BucketVersion:
    return BucketVersion(
        id=id_of(step),
        digest=f"xxh3:{step}",
        kind=Kind.FULL if base is None else Kind.DELTA,
        base=None if base is None else id_of(base),
        pinned=pinned,
        barred=barred,
    )


def pointer(*versions: BucketVersion, keep: int = 2) -> Pointer:
    made: Pointer | None = None
    for at, each in enumerate(versions):
        made = advanced(made, each, writer="a", keep=keep, now=float(at))
    assert made is not None
    return made


def ids(made: Pointer) -> list[str]:
    return [each.id for each in made.versions]


def test_the_newest_version_that_is_not_barred_is_the_target_and_kept() -> None:
    made = pointer(version(1), version(2, barred=True), version(3, barred=True), keep=1)
    assert made.target == id_of(1)
    assert id_of(1) in ids(made)


def test_what_was_rolled_back_from_takes_no_other_version_s_place() -> None:
    """Each of five versions was rolled back from; after one more good one there is still where the first ones led."""
    made = pointer(version(1), version(2))
    for step in range(3, 8):
        made = advanced(made, version(step), writer="a", keep=2, now=float(step))
        barred = tuple(replace(each, barred=each.id == id_of(step) or each.barred) for each in made.versions)
        made = replace(made, versions=barred, desired=id_of(2))
    made = advanced(made, version(8), writer="a", keep=2, now=8.0)
    assert ids(made) == [id_of(8), id_of(2)]
    assert {each.id for each in made.retired} == {id_of(step) for step in (1, 3, 4, 5, 6, 7)}


def test_the_newest_version_stays_though_it_is_barred_so_that_nothing_older_comes_to_count() -> None:
    made = kept(Pointer(run=RUN, writer="a", versions=(version(3, barred=True), version(2), version(1))), keep=1, now=0)
    assert ids(made) == [id_of(3), id_of(2)]
    with pytest.raises(PointerRefusedError, match="not newer"):
        advanced(made, version(3), writer="a", keep=1, now=9.0)


def test_a_delta_whose_base_does_not_count_does_not_count() -> None:
    with pytest.raises(PointerRefusedError, match="does not count any more"):
        advanced(pointer(version(1), version(2), version(3)), version(4, 1), writer="a", keep=2, now=9.0)


def test_a_note_cannot_lease_for_ever() -> None:
    assert lease_of(note(id_of(1), lease_seconds=1e12), 0.0).ends == MAX_LEASE_SECONDS


def note(*pulls: str, lease_seconds: float = LEASE_SECONDS) -> bytes:
    import msgspec

    return msgspec.json.encode(FollowerNote(follower="f", pulls=pulls, lease_seconds=lease_seconds))


def test_an_upload_is_dead_when_the_pointer_has_gone_past_it_and_its_time_is_over() -> None:
    made = pointer(version(1), version(3))
    assert is_dead(Order(1, 2), made, UPLOAD_SECONDS)
    assert not is_dead(Order(1, 2), made, UPLOAD_SECONDS - 1)
    assert not is_dead(Order(1, 4), made, UPLOAD_SECONDS)  # it may still count
    assert not is_dead(Order(1, 3), made, UPLOAD_SECONDS)
    assert not is_dead(Order(1, 1), made, UPLOAD_SECONDS)


def test_a_retired_version_is_no_dead_upload() -> None:
    assert not is_dead(Order(1, 1), pointer(version(1), version(2), keep=1), UPLOAD_SECONDS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("exp~trial~v000003", "../../v000003"), "no version of run"),
        (("exp~trial~v000003", "other~v000003"), "no version of run"),
        (('"run": "exp/trial"', '"run": "other"'), "of run 'other'"),
        (('"format": 1', '"format": 2'), "format 2"),
        (("exp~trial~v000003", "exp~trial~v000001"), "not in order"),
        (("{", "["), "does not parse"),
    ],
)
def test_a_pointer_that_is_none_is_refused(change: tuple[str, str], why: str) -> None:
    text = pointer(version(2), version(3)).to_json().decode()
    with pytest.raises(PointerRefusedError, match=why):
        parse_pointer(text.replace(*change).encode(), RUN)


def test_an_empty_pointer_is_refused() -> None:
    with pytest.raises(PointerRefusedError, match="not in order"):
        parse_pointer(Pointer(run=RUN, writer="a", versions=()).to_json(), RUN)


@pytest.mark.parametrize("name", ["../other", ".hidden", ""])
def test_an_upload_cannot_name_objects_of_others(name: str) -> None:
    with pytest.raises(PointerRefusedError, match="names a file"):
        parse_upload(b'{"writer": "a", "files": ["%s"], "format": 1}' % name.encode())


def test_a_list_of_runs_cannot_leave_the_prefix() -> None:
    with pytest.raises(PointerRefusedError, match="safe relative name"):
        parse_runs(b'{"runs": ["../other"], "format": 1}')
