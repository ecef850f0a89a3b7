"""What is remembered stays within its bounds."""

from hypothesis import given
from hypothesis import strategies as st

from refitd_client.checkpoint.header import BoundedCache


def test_what_was_longest_not_asked_for_goes_first() -> None:
    recent: BoundedCache[str, int] = BoundedCache(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert [recent.get(key) for key in "abc"] == [1, None, 3]


def test_what_is_too_heavy_alone_is_not_kept_and_drives_nothing_else_out() -> None:
    recent: BoundedCache[str, int] = BoundedCache(9, 10)
    recent.put("a", 1, 10)
    recent.put("b", 2, 11)
    assert [recent.get(key) for key in "ab"] == [1, None]
    recent.put("a", 3, 11)
    assert recent.get("a") is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12), st.booleans())))
def test_no_more_and_nothing_heavier_is_kept_than_was_said(steps: list[tuple[str, int, bool]]) -> None:
    recent: BoundedCache[str, int] = BoundedCache(3, 10)
    for key, weight, asks in steps:
        if asks:
            recent.get(key)
        else:
            recent.put(key, weight, weight)
            assert recent.get(key) == (weight if weight <= 10 else None)
        kept = [weight for key in "abcdef" if (weight := recent.get(key)) is not None]
        assert len(kept) <= 3
        assert sum(kept) <= 10
