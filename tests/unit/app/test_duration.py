"""Durations as people say them."""

import pytest

from refitd.text import spoken


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (0.2, "0 s"),
        (45, "45 s"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (85260, "23 h 41 min"),
        (86400, "24 h"),
        (2 * 86400, "2 d"),
        (2 * 86400 + 3 * 3600 + 59, "2 d 3 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert spoken(seconds) == text
