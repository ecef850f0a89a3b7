"""A variable that names a root which is not there: the log says so, and the channel opens where versions come from."""

from pathlib import Path
from typing import Any

import pytest

from refitd_plugin import channel
from refitd_plugin.settings import PluginSettings
from support.sockets import ask
from support.tiny_rank import Rank, version


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CHANNEL_RETRY_SECONDS", 0.01)


def rank_with(startup: Path, root: Path) -> Any:
    rank = Rank(startup)
    rank.plugin._settings = PluginSettings(root=root)
    return rank


def test_a_root_that_is_not_there_is_named_in_the_log_with_its_variable(
    tmp_path: Path, startup: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = rank_with(startup, tmp_path / "nowhere")
    rank.plugin.rank_of(rank.updater)
    (line,) = [each for each in caplog.messages if "REFITD_SGLANG_ROOT" in each]
    assert f"REFITD_SGLANG_ROOT is '{tmp_path}/nowhere'" in line
    assert f"this server sees no root of refitd at {tmp_path}/nowhere" in line


def test_the_first_version_from_another_root_opens_the_channel_there(
    tmp_path: Path, root: Path, startup: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / ".refitd").mkdir(exist_ok=True)
    rank = rank_with(startup, tmp_path / "nowhere")
    rank.answer(version(root, 1))
    installed = rank.plugin.rank_of(rank.updater)
    assert installed._channel.is_open(30)
    (socket,) = (root / ".refitd/engines").iterdir()
    assert ask(socket, do="prepare", path=version(root, 2).relative_to(root).as_posix())["ok"]
    assert f"opens its channel in {root}" in caplog.text


def test_a_root_that_is_there_stays_the_channel_s_whatever_is_loaded(tmp_path: Path, root: Path, startup: Path) -> None:
    (root / ".refitd").mkdir(exist_ok=True)
    (tmp_path / "mine/.refitd").mkdir(parents=True)
    rank = rank_with(startup, tmp_path / "mine")
    rank.answer(version(root, 1))
    installed = rank.plugin.rank_of(rank.updater)
    assert installed._channel.is_open(30)
    assert installed._channel.root == tmp_path / "mine"
