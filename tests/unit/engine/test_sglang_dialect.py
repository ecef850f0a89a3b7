"""What is believed of each release of SGLang. The facts were read from the released wheels."""

import pytest

from refitd.engine.sglang.info import release_of


@pytest.mark.parametrize(
    ("version", "supported", "pause_mode", "names_startup"),
    [
        ("0.4.9.post6", False, "abort", False),
        ("0.5.3", False, "abort", False),
        ("0.5.11", False, "abort", False),
        ("0.5.12", True, "abort", False),
        ("0.5.16.post1", True, "abort", False),
        ("0.5.17", True, "abort", False),
        ("0.5.18", True, "abort", True),
        ("0.5.20", True, "abort", True),
        ("0.5.21.dev7+gabc", True, "abort", True),
        ("0.5.21", True, "retract", True),
        ("0.5.23", True, "retract", True),
        ("0.5.23+refitd-embedded", True, "retract", True),
        ("0.6.0rc1", True, "retract", True),
        ("1.0.0", True, "retract", True),
    ],
)
def test_each_release_is_spoken_to_in_its_own_way(
    version: str, supported: bool, pause_mode: str, names_startup: bool
) -> None:
    dialect = release_of(version)
    found = (dialect.supported, dialect.pause_mode("auto"), dialect.names_startup)
    assert found == (supported, pause_mode, names_startup)


@pytest.mark.parametrize("version", ["", "unknown", "main", "0.5", "0.0.0", "0.0.0.dev1+gabc"])
def test_a_version_that_says_nothing_gets_the_careful_dialect(version: str) -> None:
    dialect = release_of(version)
    assert dialect.supported
    assert (dialect.pause_mode("retract"), dialect.dies_of_flush, dialect.names_startup) == ("abort", True, False)


@pytest.mark.parametrize(
    ("version", "dies_of_flush", "modes"),
    [
        ("0.5.20", True, {"abort": "abort", "retract": "abort", "keep": "abort"}),
        ("0.5.21", True, {"abort": "abort", "retract": "retract", "keep": "retract"}),
        ("0.5.22rc1", True, {"abort": "abort", "retract": "retract", "keep": "retract"}),
        ("0.5.22", False, {"abort": "abort", "retract": "retract", "keep": "retract"}),
    ],
)
def test_no_server_is_paused_in_a_mode_that_it_would_not_survive(
    version: str, dies_of_flush: bool, modes: dict[str, str]
) -> None:
    dialect = release_of(version)
    assert dialect.dies_of_flush is dies_of_flush
    assert {wanted: dialect.pause_mode(wanted) for wanted in modes} == modes
