"""What is believed of each release of SGLang. The facts were read from the released wheels."""

import pytest

from refitd.engine.sglang.info import release_of


@pytest.mark.parametrize(
    ("version", "supported", "dies_of_flush"),
    [
        ("0.4.9.post6", False, True),
        ("0.5.12.post1", False, True),
        ("0.5.20", False, True),
        ("0.5.21.dev7+gabc", False, True),
        ("0.5.21", True, True),
        ("0.5.22rc1", True, True),
        ("0.5.22", True, False),
        ("0.5.23+refitd-embedded", True, False),
        ("0.6.0rc1", True, False),
        ("1.0.0", True, False),
    ],
)
def test_each_release_is_spoken_to_in_its_own_way(version: str, supported: bool, dies_of_flush: bool) -> None:
    release = release_of(version)
    assert (release.supported, release.dies_of_flush) == (supported, dies_of_flush)
    modes = {wanted: release.pause_mode(wanted) for wanted in ("auto", "abort", "retract", "keep")}
    assert modes == {"auto": "retract", "abort": "abort", "retract": "retract", "keep": "retract"}


@pytest.mark.parametrize("version", ["", "unknown", "main", "0.5", "0.0.0", "0.0.0.dev1+gabc"])
def test_a_version_that_says_nothing_is_treated_with_care(version: str) -> None:
    release = release_of(version)
    assert release.supported
    assert (release.pause_mode("retract"), release.dies_of_flush) == ("abort", True)
