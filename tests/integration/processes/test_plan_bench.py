"""`make bench-plan` without a GPU: what it asks of server, trainer and driver, and what it makes of their answers.

Server and trainer are stand-ins that write down how much they hold, which is what the driver says.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu_plan
from refitd_plan import Gpu
from support.sockets import free_port

GPU = Gpu(memory=139.8, uuid="GPU-1", name="H200")
SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with open(os.environ["HELD"], "w") as file:
            file.write(os.environ["HELD_BY_SERVER"])
        self.do_GET()
    def log_message(self, *_): pass
class Server(ThreadingHTTPServer):
    request_queue_size = 128
Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
TRAINER = """
import os, sys
print("a library says hello", flush=True)
print("imported", flush=True)
for mode in sys.argv[3].split(","):
    sys.stdin.readline()
    with open(os.environ["HELD"], "w") as file:
        file.write(str(float(os.environ["HELD_BY_SERVER"]) + float(os.environ["HELD_BY_" + mode])))
    print("and something else", flush=True)
    print(mode, 2**30, 2**31, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the GiB that the GPU holds."""
    file = tmp_path / "held"
    file.write_text("0")
    for module in ("__init__", "launch_server"):
        path = tmp_path / "site/sglang" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SERVER if module == "launch_server" else "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("HELD", str(file))
    monkeypatch.setattr(gpu_plan, "TRAINER", TRAINER)
    monkeypatch.setattr(gpu_plan, "read_gpus", lambda: (GPU,))
    monkeypatch.setattr(gpu_plan, "pynvml", nvml(file))
    return file


class NvmlError(Exception):
    """NVML's, where it does not tell processes apart."""


def nvml(file: Path) -> Any:
    def refuse(_: object) -> None:
        raise NvmlError

    def used(_: object) -> Any:
        return SimpleNamespace(used=int(float(file.read_text() or 0) * gpu_plan.GIB))

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=used,
        nvmlDeviceGetComputeRunningProcesses=refuse,
    )


def predicted(role: str, *, recompute: bool) -> float:
    return gpu_plan._predicted("0.5b", GPU, recompute=recompute)[role]["total"]


def test_predictions_are_held_against_what_is_held_and_one_that_is_off_ends_it_with_1(
    held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELD_BY_SERVER", str(predicted("generation", recompute=False)))
    monkeypatch.setenv("HELD_BY_store", str(predicted("training", recompute=False)))
    monkeypatch.setenv("HELD_BY_recompute", str(predicted("training", recompute=True) * 1.25))
    out = tmp_path / "out.json"
    assert gpu_plan.main(["--sizes", "0.5b,0.5b", "--port", str(free_port()), "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert found["gpu"] == "H200"
    rows = [(row["process"], row["off"]) for row in found["comparisons"]]
    assert rows == [("engine", 0.0), ("trainer, store", 0.0), ("trainer, recompute", -0.2)]
    assert "the worst of 3: 0.5b trainer, recompute is off by -20.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "names"), [(["--sizes", "0.5b,9b"], "'9b' is none of"), (["--out", "/nowhere/out.json"], "/nowhere")]
)
def test_what_is_wrong_with_the_command_is_said_before_anything_is_measured(
    held: Path, flags: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, OSError)) as refused:
        gpu_plan.main(flags)
    assert names in capsys.readouterr().err + str(refused.value)
    assert held.read_text() == "0"
