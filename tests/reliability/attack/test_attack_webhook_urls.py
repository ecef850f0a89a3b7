"""A webhook's URL can itself be a secret. A service is given it in a file and shows it to no other user, also where no
umask and no mode of its folders hides what it writes.
"""

import base64
import os
import stat
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import psutil
import pytest

from support.checkpoints import write_model
from support.command_line import refitd
from support.jobs import PATIENCE
from support.scripted_server import answer, serve
from support.servers import RefitdServer

pytestmark = [pytest.mark.e2e]

SECRET_PATH = "hooks-a-secret"


def files_of(*folders: Path) -> Iterator[Path]:
    """All plain files beneath these."""
    return (path for folder in folders for path in folder.rglob("*") if stat.S_ISREG(path.lstat().st_mode))


def test_other_users_see_no_url_of_a_webhook_and_write_nothing_of_the_services(tmp_path: Path) -> None:
    told = threading.Event()

    def refuses(handler: BaseHTTPRequestHandler) -> None:
        told.set()
        answer(500, f"nothing at {handler.path}".encode())(handler)

    root, state = tmp_path / "root", tmp_path / "state"
    version = root / "run/v000001"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(b"not one")
    state.mkdir()
    state.chmod(0o755)
    with serve(refuses) as receiver:
        (tmp_path / "urls").write_text(f"{receiver.url}/{SECRET_PATH}\n")
        (tmp_path / "secret").write_text(f"whsec_{base64.b64encode(bytes(32)).decode()}\n")
        flags = ["--webhooks-file", str(tmp_path / "urls"), "--webhook-secret-file", str(tmp_path / "secret")]
        flags += [
            "--base-model",
            str(write_model(tmp_path / "base")),
            "--settle",
            "0",
            "--settle-timeout",
            "1",
            "--scan-interval",
            "0.2",
        ]
        with RefitdServer(tmp_path, root, [], *flags, first=partial(os.umask, 0)) as service:
            assert told.wait(PATIENCE), service.tail()
            shown = [
                httpx.get(f"{service.url}{path}", trust_env=False).text
                for path in ("/v1/deliveries", "/v1/log", "/v1/overview", "/v1/faults", "/metrics")
            ]
            shown += [refitd(words, "--url", service.url).output for words in ("webhooks", "status", "log")]
            shown += psutil.Process(service.pid).cmdline()
            kept = {path: path.read_bytes() for path in files_of(state)}
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files_of(state, root / ".refitd")}
    shown.append(service.log.read_text())
    assert any(receiver.url in text for text in shown)
    assert not any(SECRET_PATH in text for text in shown)
    hold_it = {path.name: modes[path] for path, data in kept.items() if SECRET_PATH.encode() in data}
    assert "journal.db-wal" in hold_it
    assert set(hold_it.values()) == {0o600}
    assert all(modes[root / ".refitd" / name] & 0o022 == 0 for name in ("id", "journal"))
    assert not [path for path, mode in modes.items() if mode & 0o002]
