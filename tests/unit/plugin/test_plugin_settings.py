"""What the operator sets."""

from pathlib import Path

import pytest

from refitd_plugin.settings import PluginSettings, SettingError, read_settings

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "plugin.md"


def test_nothing_set_means_on() -> None:
    assert read_settings("REFITD_SGLANG", {}) == PluginSettings()


@pytest.mark.parametrize("word", ["off", "OFF", " 0", "no", "false"])
def test_it_can_be_switched_off_whatever_else_is_set(word: str) -> None:
    assert not read_settings("REFITD_SGLANG", {"REFITD_SGLANG": word, "REFITD_SGLANG_WAIT": "soon"}).on


def test_each_setting_is_read() -> None:
    said = {"REFITD_SGLANG_ROOT": "/r", "REFITD_SGLANG_CHECK": "headers", "REFITD_SGLANG_WAIT": "5"}
    assert read_settings("REFITD_SGLANG", said) == PluginSettings(root=Path("/r"), check_bytes=False, wait=5.0)


@pytest.mark.parametrize(
    ("name", "value"), [("REFITD_SGLANG_CHECK", "some"), ("REFITD_SGLANG_WAIT", "-1"), ("REFITD_SGLANG_WAIT", "x")]
)
def test_what_cannot_be_understood_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=name):
        read_settings("REFITD_SGLANG", {name: value})


def test_every_setting_is_documented() -> None:
    text = DOCUMENT.read_text()
    for name in ("REFITD_SGLANG=off", "REFITD_SGLANG_ROOT", "REFITD_SGLANG_CHECK", "REFITD_SGLANG_WAIT"):
        assert name in text
