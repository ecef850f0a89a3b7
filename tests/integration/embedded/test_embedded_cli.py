"""`python -m refitd_embedded` as a process."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from refitd_embedded.__main__ import main
from refitd_embedded.weights import load
from support.embedded_kit import checkpoint

READY = "refitd_embedded ready on "


@contextmanager
def running(*arguments: object, replicas: int = 1) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process and the addresses it says it listens on."""
    command = [sys.executable, "-m", "refitd_embedded", *map(str, arguments), "--port", "0"]
    command += ["--replicas", str(replicas)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise AssertionError("no pipe")
            yield process, [process.stdout.readline().removeprefix(READY).strip() for _ in range(replicas)]
        finally:
            process.kill()


@pytest.mark.e2e
def test_replicas_have_ports_and_weights_of_their_own_and_end_with_sigterm(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", 1), checkpoint(tmp_path / "b", 2)
    with running("--model-path", first, "--api-key", "secret", replicas=2) as (process, urls):
        with httpx.Client(headers={"Authorization": "Bearer secret"}) as client:
            body = {"model_path": str(second), "weight_version": "7"}
            assert client.post(f"{urls[0]}/update_weights_from_disk", json=body).status_code == 200
            versions = [client.get(f"{url}/model_info").json()["weight_version"] for url in urls]
            sums = [client.get(f"{url}/weights_checker").json()["per_engine_checksum"] for url in urls]
            command = client.get(f"{urls[1]}/server_info").json()["launch_command"]
        assert versions == ["7", "default"]
        assert sums[0] != sums[1]
        assert "secret" not in command
        assert httpx.get(f"{urls[0]}/model_info").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert main(["--model-path", "somewhere"]) == 2
    assert capsys.readouterr().err == "refitd_embedded needs its extra: pip install '.[embedded]' in its clone\n"


@pytest.mark.parametrize(
    ("config", "named"), [(None, "config.json"), ('{"model_type": "mamba"}', "mamba"), ("{}", "model_type None")]
)
def test_a_model_that_cannot_be_served_is_one_line(
    tmp_path: Path, config: str | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["--model-path", str(tmp_path), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("refitd_embedded: ")
    assert named in line


def test_a_model_to_try_things_with_is_made_and_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--make-model", str(tmp_path / "tiny")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'tiny'}\n"
    assert load(tmp_path / "tiny").state_dict()
    assert main(["--make-model", str(tmp_path / "tiny")]) == 0, "as a volume that is mounted once more has it"
    assert main(["--make-model", str(checkpoint(tmp_path / "other", 1))]) == 2
    assert "is not empty" in capsys.readouterr().err
