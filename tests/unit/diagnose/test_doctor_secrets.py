"""`refitd doctor` names each file of secrets that users outside its group can read."""

from pathlib import Path

import pytest

from refitd.settings import Settings
from refitd_doctor.finding import CheckName, CheckVerdict
from refitd_doctor.service import judge_settings

FILES = {
    "token": "a-token-to-change",
    "read_token": "a-token-to-look",
    "engine_key": "a-key",
    "engine_admin_key": "a-key",
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """All of them, for their owner alone."""
    for name, text in FILES.items():
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(f"{text}\n")
    return Settings.model_validate({"root": tmp_path} | {f"{name}_file": tmp_path / name for name in FILES})


def warnings(settings: Settings) -> list[tuple[str, str | None]]:
    """The subjects of warnings about secrets, and what to do."""
    found = [each for each in judge_settings(settings) if each.check is CheckName.SETTINGS]
    return [(each.subject, each.fix) for each in found if each.verdict is CheckVerdict.WARNING]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_secrets_that_every_user_can_read_is_found(settings: Settings, tmp_path: Path, name: str) -> None:
    (tmp_path / name).chmod(0o640)
    assert warnings(settings) == []
    (tmp_path / name).chmod(0o644)
    assert warnings(settings) == [(str(tmp_path / name), f"chmod 640 {tmp_path / name}")]


def test_the_file_of_a_key_that_is_not_there_yet_is_no_warning(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "engine_key").unlink()
    assert warnings(settings) == []
