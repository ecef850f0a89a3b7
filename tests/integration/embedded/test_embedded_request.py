"""One request: which weights its tokens came from, when it ends, and what is answered about it."""

import pytest

from refitd_embedded.runner import VersionSpan, spans


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ([("1", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 2), ("2", 4)], [VersionSpan("1", 0, 2), VersionSpan("2", 2, 4)]),
        ([("1", 2), ("2", 2), ("3", 4)], [VersionSpan("1", 0, 2), VersionSpan("3", 2, 4)]),
        ([("1", 2), ("1", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 4), ("2", 4)], [VersionSpan("1", 0, 4)]),
        ([("1", 0)], [VersionSpan("1", 0, 0)]),
    ],
    ids=["one", "two", "none-in-between", "back-to-the-same", "no-token-of-the-last", "no-token-at-all"],
)
def test_spans_cover_the_tokens_once(changes: list[tuple[str, int]], wanted: list[VersionSpan]) -> None:
    assert spans(changes, changes[-1][1]) == wanted
