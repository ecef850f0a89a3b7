"""Settings: from the environment, with sizes, lists and the rule about listening."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from refitd.policy.strategy import Strategy, StrategyName
from refitd.settings import Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REFITD_TOKEN", "REFITD_TOKEN_FILE", "REFITD_ENGINES", "REFITD_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [name for name in Settings.model_fields if name != "root" and "token" not in name]
    unset = Settings(root=tmp_path)
    for name in names:
        monkeypatch.setenv(f"REFITD_{name.upper()}", "")
    assert Settings(root=tmp_path) == unset


def test_an_empty_token_is_refused_unless_a_file_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("good")
    monkeypatch.setenv("REFITD_TOKEN", "")
    with pytest.raises(ValueError, match="REFITD_TOKEN is empty"):
        Settings(root=tmp_path)
    assert Settings(root=tmp_path, token_file=tmp_path / "token").tokens().write == ("good",)
    monkeypatch.setenv("REFITD_FOLLOW_TOKEN_FILE", "")
    with pytest.raises(ValueError, match="REFITD_FOLLOW_TOKEN_FILE is empty"):
        Settings(root=tmp_path, token_file=tmp_path / "token")


@pytest.mark.parametrize(
    ("size", "expected"),
    [("200GB", 200 * 10**9), ("1 GiB", 2**30), ("17B", 17), ("2kb", 2000), ("1048576", 2**20), ("0", 0)],
)
def test_sizes_have_units(tmp_path: Path, size: str, expected: int) -> None:
    assert Settings(root=tmp_path, disk_budget=size).disk_budget == expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", ["many", "GB", "1 parsec", "-", "1..5GB"])
def test_what_is_no_size_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(ValidationError, match="not a size"):
        Settings(root=tmp_path, disk_budget=size)  # pyright: ignore[reportArgumentType]


def test_without_a_token_the_service_listens_on_loopback_only(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="REFITD_TOKEN"):
        Settings(root=tmp_path, host="0.0.0.0")  # noqa: S104 - the point of the test
    assert Settings(root=tmp_path, host="0.0.0.0", token="x")  # noqa: S104 # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"canary_check": "http://a"}, "--canary-check is for --strategy canary, and the strategy is all"),
        ({"strategy": "all:2"}, "'all:2' is none of 'all'"),
        ({"strategy": "rolling:0"}, "'rolling:N' \\(1 or more\\)"),
        ({"strategy": "rolling:two"}, "'rolling:two' is none of"),
        ({"strategy": "blue-green"}, "'blue-green' is none of"),
        ({"lora": "actor:0"}, "NAME or NAME:KEEP, with at least 1 to keep"),
        ({"lora": "a/b"}, "is no name for adapters"),
    ],
)
def test_what_the_strategy_would_pass_over_is_refused(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Settings(root=tmp_path, **given)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("rolling", Strategy(name=StrategyName.ROLLING)),
        ("rolling:2", Strategy(name=StrategyName.ROLLING, max_unavailable=2)),
        ("canary", Strategy(name=StrategyName.CANARY)),
        ("canary:gpu-1:30000", Strategy(name=StrategyName.CANARY, canary="gpu-1:30000")),
    ],
)
def test_a_strategy_is_said_with_its_number_or_its_engine(tmp_path: Path, text: str, read: Strategy) -> None:
    settings = Settings(root=tmp_path, strategy=text)  # pyright: ignore[reportArgumentType]
    assert settings.strategy == read
    assert str(read) == text


def test_adapters_are_named_with_how_many_stay(tmp_path: Path) -> None:
    kept = [Settings(root=tmp_path, lora=text).engine_access.lora_keep for text in ("actor", "actor:4")]  # pyright: ignore[reportArgumentType]
    assert kept == [2, 4]


def test_the_token_does_not_show(tmp_path: Path) -> None:
    assert "hush" not in repr(Settings(root=tmp_path, token="hush"))  # pyright: ignore[reportArgumentType]


def test_a_token_file_is_read_again_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    settings = Settings(root=tmp_path, token_file=file)
    assert settings.tokens().write == ("one",)
    file.write_text("two\n")
    assert settings.tokens().write == ("two",)


def test_each_root_has_a_journal_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one, two = Settings(root=tmp_path / "a/weights"), Settings(root=tmp_path / "b/weights")
    assert one.state_folder.parent == tmp_path / "state/refitd"
    assert one.state_folder != two.state_folder


def test_deltas_are_taken_where_there_is_a_copy_for_them_and_adapters_are_not_served(tmp_path: Path) -> None:
    assert Settings(root=tmp_path).takes_deltas
    assert not Settings(root=tmp_path, lora="actor").takes_deltas
