"""`refitd serve`: its flags are the settings, flags win over the environment, and what is wrong is named."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from refitd.cli.serve import PANELS, flag, parameters, settings_from
from refitd.settings import Settings
from support.command_line import refitd

SECRETS = {"token"}  # a flag could be read by every user of the machine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Takes the service's place: what it would be started with."""
    calls: list[Settings] = []

    def serve(settings: Settings, *, json: bool) -> int:
        calls.append(settings)
        return 0

    monkeypatch.setitem(sys.modules, "refitd.app", SimpleNamespace(serve=serve))
    return calls


def test_every_setting_has_a_flag_but_the_secrets() -> None:
    assert {parameter.name for parameter in parameters()} == set(Settings.model_fields) - SECRETS


def test_every_setting_is_placed_in_the_help() -> None:
    placed = [name for names in PANELS.values() for name in names]
    assert sorted(placed) == sorted(Settings.model_fields)


def test_the_settings_that_matter_first_come_first() -> None:
    panel, first = next(iter(PANELS.items()))
    assert (panel, len(first)) == ("Begin with these", 14)
    shown = refitd("serve", "--help", env={"COLUMNS": "120"}).output
    assert max(shown.index(f"│ {flag(name)}") for name in first) < min(
        shown.index(f"│ {flag(name)}") for name in Settings.model_fields if name not in {*first, *SECRETS}
    )


def test_flags_become_settings(started: list[Settings], tmp_path: Path) -> None:
    result = refitd(
        *("serve", "--root", str(tmp_path), "--engine", "http://a:1", "--engine", "http://b:2,http://c:3"),
        *("--port", "0", "--disk-budget", "200GB", "--scan-interval", "0.5", "--allow-dtype-cast"),
    )
    assert result.exit_code == 0, result.output
    settings = started[0]
    assert settings.root == tmp_path
    assert settings.engines == ["http://a:1", "http://b:2", "http://c:3"]
    assert (settings.port, settings.disk_budget, settings.scan_interval) == (0, 200 * 10**9, 0.5)
    assert settings.allow_dtype_cast


def test_a_flag_wins_and_what_has_no_flag_comes_from_the_environment(started: list[Settings], tmp_path: Path) -> None:
    environment = {
        "REFITD_ROOT": "/elsewhere",
        "REFITD_ENGINES": "http://a:1, http://b:2",
        "REFITD_PORT": "1",
        "REFITD_TOKEN": "secret",
        "REFITD_ALLOW_DTYPE_CAST": "true",
    }
    assert refitd("serve", "--root", str(tmp_path), "--port", "2", env=environment).exit_code == 0
    settings = started[0]
    assert (settings.root, settings.port) == (tmp_path, 2)
    assert settings.engines == ["http://a:1", "http://b:2"]
    assert settings.allow_dtype_cast
    assert settings.tokens().write == ("secret",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "abc"], "--port (REFITD_PORT): it is not a whole number"),
        (["--port", "99999"], "--port (REFITD_PORT): it has to be 65535 or less"),
        (["--keep-last", "0"], "--keep-last (REFITD_KEEP_LAST): it has to be 1 or more"),
        (["--lease", "soon"], "--lease (REFITD_LEASE): it is not a number"),
        (["--prove", "maybe"], "--prove (REFITD_PROVE): it has to be 'engine' or 'service'"),
        (["--scan-interval", "0"], "--scan-interval (REFITD_SCAN_INTERVAL): it has to be more than 0"),
    ],
)
def test_a_value_that_cannot_be_one_is_refused_in_plain_words(tmp_path: Path, flags: list[str], said: str) -> None:
    result = refitd("serve", "--root", str(tmp_path), *flags)
    assert (result.exit_code, result.stderr) == (2, f"{said}\n")


def test_the_exit_code_is_the_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "refitd.app", SimpleNamespace(serve=lambda _, json: 1))
    assert refitd("serve", "--root", str(tmp_path)).exit_code == 1


def test_a_rule_over_several_settings_is_told_as_it_is(started: list[Settings]) -> None:
    result = refitd("serve", "--root", "/x", "--host", "0.0.0.0")  # noqa: S104 - that is what is refused
    assert result.exit_code == 2
    assert result.stderr.startswith("host 0.0.0.0 is reachable from other machines")
    assert not started


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--engine", "127.0.0.1:33000"), "--engine (REFITD_ENGINES): engine URL '127.0.0.1:33000': write it as http"),
        (("--engines-file", "/none.yaml"), "--engines-file (REFITD_ENGINES_FILE): the engines file /none.yaml cannot"),
        (("--base-model", "/none"), "--base-model (REFITD_BASE_MODEL): /none is not a folder"),
        (("--canary-check", "http://a"), "--canary-check is for --strategy canary"),
    ],
)
def test_what_cannot_work_ends_it_at_once_with_one_line(
    started: list[Settings], flags: tuple[str, str], named: str
) -> None:
    result = refitd("serve", "--root", "/x", *flags)
    assert result.exit_code == 2
    assert result.stderr.startswith(named)
    assert result.stderr.count("\n") == 1
    assert not started


def test_json_is_json_logs_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    serve = SimpleNamespace(serve=lambda _, json: told.append(json))
    monkeypatch.setitem(sys.modules, "refitd.app", serve)
    refitd("serve", "--root", "/x", "--json")
    refitd("serve", "--root", "/x")
    assert told == [True, False]
    shown = " ".join(refitd("serve", "--help", env={"COLUMNS": "200"}).output.split())
    assert "Log in JSON on a terminal too; settings that cannot be used are one JSON document" in shown
    assert "the answer, or a problem" not in shown


def test_a_secret_is_not_shown_when_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_TOKEN", "the-secret")
    monkeypatch.setenv("REFITD_PORT", "high")
    with pytest.raises(ValueError, match="--port") as caught:
        settings_from({"root": "/x"})
    assert "the-secret" not in str(caught.value)
