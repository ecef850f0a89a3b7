"""`refitd serve` as a process, where it cannot start or starts with a setting that is probably a slip."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

from support.command_line import refitd


def serve(root: Path, *flags: str) -> "subprocess.Popen[str]":
    root.mkdir()
    state = ("--state", str(root.with_name("state")))
    command = [sys.executable, "-m", "refitd", "serve", "--root", str(root), *state, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_port_that_is_taken_ends_it_with_one_line_and_before_a_journal_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(tmp_path / "root", "--port", str(port)) as process:
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert f"port {port} on 127.0.0.1 is taken: choose another with --port" in line
    assert not list((tmp_path / "state").glob("journal*"))


def test_a_canary_that_is_no_engine_is_warned_of_once(tmp_path: Path) -> None:
    strategy = ("--strategy", "canary:nobody")
    with serve(tmp_path / "root", "--port", "0", "--engine", "http://127.0.0.1:1", *strategy) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"].startswith("refitd ready on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    warnings = [line for line in err.splitlines() if "no engine is called nobody (--strategy), but 127.0.0.1:1" in line]
    assert all(json.loads(line)["event"] for line in err.splitlines()), "both streams may go to one file"
    assert len(warnings) == 1
    assert '"level": "warning"' in warnings[0]


def test_insecure_with_engine_keys_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "key").chmod(0o600)
    keys = ("--insecure", "--engine-key-file", str(tmp_path / "key"))
    with serve(tmp_path / "root", "--port", "0", "--engine", "http://127.0.0.1:1", *keys) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    (warning,) = [line for line in err.splitlines() if "engines have keys (--engine-key-file)" in line]
    assert '"level": "warning"' in warning
    assert "any user of this machine" in warning


def test_doctor_finds_out_that_the_service_at_its_port_is_of_another_root(tmp_path: Path) -> None:
    """Versions that are published into this root would be announced to a service that never finds them."""
    (tmp_path / "other").mkdir()
    with serve(tmp_path / "root", "--port", "0") as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["event"].rpartition(":")[2]
        places = ("--state", str(tmp_path / "none"), "--port", port, "--json")
        stray = refitd("doctor", "--root", str(tmp_path / "other"), *places)
        right = refitd("doctor", "--root", str(tmp_path / "root"), *places)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    (found,) = [each for each in json.loads(stray.stdout)["findings"] if each["verdict"] == "failed"]
    assert found["text"].startswith("the service there is of another root: your root is not this service's")
    assert not [each for each in json.loads(right.stdout)["findings"] if each["verdict"] == "failed"]
