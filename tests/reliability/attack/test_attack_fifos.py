"""A FIFO where the service keeps something of its own: to open one for reading waits until somebody writes to it."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from refitd_client import RefitClient
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState
from support.checkpoints import publish, tensors, write_model
from support.servers import RefitdServer

pytestmark = [pytest.mark.e2e]

PATIENCE = 30.0  # seconds
NAMES = ["journal", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("id", "lock", "handover.key"))]


def test_a_fifo_in_place_of_the_root_s_name_hangs_nothing_and_all_goes_on_when_it_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    name = root / SERVICE_FOLDER / "id"
    base = write_model(tmp_path / "base")
    flags = ["--base-model", str(base), "--scan-interval", "0.05"]
    with RefitdServer(tmp_path, root, [], *flags) as refitd, RefitClient(refitd.url) as client:
        name.rename(tmp_path / "kept")
        os.mkfifo(name)
        publish(root, "run", 1, tensors(1))
        ready = until_not_ready(refitd.url)
        assert "cannot be read" in ready
        name.unlink()
        (tmp_path / "kept").rename(name)
        for event in client.events("0"):
            if event.subject == "run~v000001" and event.data.get("state") == VersionState.SEALED:
                break


def until_not_ready(url: str) -> str:
    """Ask until the service says that the root is not to be believed; what it says."""
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as http:
        while (answer := http.get("/readyz")).status_code == 200:
            assert http.get("/healthz").status_code == 200
        return answer.text


@pytest.mark.parametrize("name", NAMES)
def test_a_service_that_finds_a_fifo_at_its_start_starts_or_says_why_it_does_not(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / SERVICE_FOLDER).mkdir(parents=True)
    with RefitdServer(tmp_path, root, []):
        pass
    path = root / SERVICE_FOLDER / name
    path.unlink()
    os.mkfifo(path)
    command = [sys.executable, "-m", "refitd", "serve", "--root", str(root), "--state", str(tmp_path / "state")]
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if " ready on http://" in line or "refitd does not start" in line:
                break
        else:
            raise AssertionError("it ended without a word")
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE)
