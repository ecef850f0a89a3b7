"""Which versions get files, where engines take them from the trainer's memory."""

import pytest

from refitd_client.publish.options import DurabilityPolicy


@pytest.mark.parametrize(
    ("policy", "files"),
    [
        ("always", [True, True, True, True, True, True]),
        ("every=1", [True, True, True, True, True, True]),
        ("every=3", [True, False, False, True, False, False]),
        ("never", [False, False, False, False, False, False]),
    ],
)
def test_the_first_version_of_a_publisher_gets_files_and_then_one_of_so_many(policy: str, files: list[bool]) -> None:
    durability, since, got = DurabilityPolicy.of(policy), None, list[bool]()
    for _ in files:
        got.append(durability.of_next(since) is None)
        since = 0 if got[-1] else (since or 0) + 1
    assert got == files


@pytest.mark.parametrize(
    "text", ["", "often", "every", "every=", "every=0", "every=-1", "every=1.5", "Always", "every=10 "]
)
def test_anything_else_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"'always', 'never', or 'every=10'"):
        DurabilityPolicy.of(text)
