"""Settings that name files and engines are looked at before the start."""

import re
from pathlib import Path
from typing import Any

import pytest

from refitd.preflight import faults_of, keys_without_token, stranger
from refitd.settings import Settings
from support.checkpoints import write_model


def settings(tmp_path: Path, **more: Any) -> Settings:
    return Settings(root=tmp_path, **more)


def check_start(settings: Settings) -> None:
    if faults := faults_of(settings):
        raise ValueError("\n".join(faults))


def test_a_whole_model_and_a_good_engines_file_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- http://a:1\n")
    check_start(settings(tmp_path, base_model=write_model(tmp_path / "base"), engines_file=file))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda base: base.rename(base.with_name("elsewhere")), "is not a folder on this machine"),
        (lambda base: next(base.glob("*.safetensors")).unlink(), "safetensors"),
        (lambda base: (base / "config.json").unlink(), "has no config.json"),
    ],
)
def test_a_base_model_that_is_none_is_refused(tmp_path: Path, spoil: Any, named: str) -> None:
    base = write_model(tmp_path / "base")
    spoil(base)
    with pytest.raises(ValueError, match=named) as caught:
        check_start(settings(tmp_path, base_model=base))
    assert str(caught.value).startswith("--base-model (REFITD_BASE_MODEL): ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"engine_key_file": "/k"}, "--engine-key-file"),
        ({"engine_admin_key_file": "/k"}, "--engine-admin-key-file"),
        ({"engines_file": "FILE"}, "--engines-file"),
    ],
)
def test_engines_with_keys_want_a_service_with_a_token(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- {url: 'http://a:1', admin_key_file: /k}\n")
    given = {name: str(file) if value == "FILE" else value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"{named}.*no token.*--token-file.*--insecure"):
        check_start(settings(tmp_path, **given))
    check_start(settings(tmp_path, token="t", **given))
    check_start(settings(tmp_path, insecure=True, **given))
    assert re.search(f"{named}.*no token", keys_without_token(settings(tmp_path, insecure=True, **given)) or "")
    assert keys_without_token(settings(tmp_path, insecure=True, token="t", **given)) is None
    assert keys_without_token(settings(tmp_path, insecure=True)) is None


@pytest.mark.parametrize("text", [None, "engines: [", "engines: [{}]"])
def test_an_engines_file_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "engines.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=str(file)) as caught:
        check_start(settings(tmp_path, engines_file=file))
    assert str(caught.value).startswith("--engines-file (REFITD_ENGINES_FILE): ")
    assert "\n" not in str(caught.value)


def test_a_canary_that_nobody_named_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("- http://b:1\n- {url: 'http://c:1', id: c}\n")

    def canary(name: str) -> Settings:
        return settings(tmp_path, engines=["http://a:1"], engines_file=file, strategy=f"canary:{name}")

    assert [stranger(canary(name), ["d"]) for name in ("a:1", "b:1", "c", "d")] == [None] * 4
    assert stranger(canary("nowhere"), ["d"]) == "no engine is called nowhere (--strategy), but a:1, b:1, c, d"
    assert stranger(settings(tmp_path), []) is None
