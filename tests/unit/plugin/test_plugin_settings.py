"""What the operator sets."""

from pathlib import Path

import pytest

from refitd_client.contract.plugin import variable_meant
from refitd_plugin.settings import PluginSettings, read_settings

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "plugin.md"


def test_nothing_set_means_on() -> None:
    assert read_settings("REFITD_SGLANG", {}) == PluginSettings()


@pytest.mark.parametrize("word", ["off", "OFF", " 0", "no", "false"])
def test_it_can_be_switched_off_whatever_else_is_set(word: str) -> None:
    assert not read_settings("REFITD_SGLANG", {"REFITD_SGLANG": word, "REFITD_SGLANG_WAIT": "soon"}).on


def test_each_setting_is_read() -> None:
    said = {"REFITD_SGLANG_ROOT": "/r", "REFITD_SGLANG_WAIT": "5"}
    assert read_settings("REFITD_SGLANG", said) == PluginSettings(root=Path("/r"), wait=5.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REFITD_SGLANG", "offf"),
        ("REFITD_SGLANG_WAIT", "-1"),
        ("REFITD_SGLANG_WAIT", "x"),
        ("REFITD_SGLANG_PROVE", "gpu"),
    ],
)
def test_what_cannot_be_understood_is_named_and_leaves_the_root_that_the_channel_opens_in(
    name: str, value: str
) -> None:
    settings = read_settings("REFITD_SGLANG", {name: value, "REFITD_SGLANG_ROOT": "/r"})
    assert settings.fault is not None
    assert settings.fault.startswith(f"{name} is {value!r}: it m")
    assert (settings.on, settings.root) == (True, Path("/r"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("REFITD_SGLANG_ROOTT", "REFITD_SGLANG_ROOT"),
        ("REFITD_VLLM_PROOVE", "REFITD_VLLM_PROVE"),
        ("REFITD_SGLANG_ROOT", None),
        ("REFITD_SGLANG_PORT", None),  # Kubernetes, of a service that is called refitd-sglang
        ("REFITD_SGLANG_SERVICE_HOST", None),
        ("REFITD_SGLANG_PORT_30000_TCP_ADDR", None),
        ("REFITD_ROOTT", None),
    ],
)
def test_a_variable_with_a_slip_in_its_name_is_known_by_the_one_that_was_meant(name: str, meant: str | None) -> None:
    assert variable_meant(name) == meant


def test_a_variable_with_a_slip_in_its_name_is_warned_about_by_name(caplog: pytest.LogCaptureFixture) -> None:
    settings = read_settings("REFITD_SGLANG", {"REFITD_SGLANG_ROOTT": "/secret", "REFITD_VLLM_ROOTT": "/r"})
    assert (settings.on, settings.fault, settings.root) == (True, None, None)
    (line,) = caplog.messages
    assert line == "refitd does not read REFITD_SGLANG_ROOTT: did you mean REFITD_SGLANG_ROOT?"


def test_every_setting_is_documented() -> None:
    text = DOCUMENT.read_text()
    for name in ("REFITD_SGLANG=off", "REFITD_SGLANG_ROOT", "REFITD_SGLANG_WAIT"):
        assert name in text
