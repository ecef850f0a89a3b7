"""deploy/systemd and deploy/slurm for many hosts: a follower's unit, and a job that really runs hub and followers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from refitd.settings import Settings
from support.checkpoints import write_model
from support.scripted_sglang import scripted_sglang
from support.sockets import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd/refitd-follower@.service").read_text()
JOB = DEPLOY / "slurm/hosts.sbatch"
MOST_EXPOSED = 20  # in tenths: what systemd-analyze security may say at most
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


@needs_systemd
def test_systemd_takes_the_follower_s_unit_and_it_is_contained(tmp_path: Path) -> None:
    unit = tmp_path / "refitd-follower@main.service"
    unit.write_text(UNIT.replace("/opt/refitd/bin/refitd ", f"{sys.executable} -m refitd "))
    for words in (["verify", "--man=no"], ["security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager"]):
        done = subprocess.run(["systemd-analyze", *words, unit], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_end_of_a_follower_does_not_empty_its_root() -> None:
    """RemoveIPC=yes deletes all that the unit's user has in /dev/shm."""
    assert re.findall(r"^RemoveIPC=(.*)$", UNIT, re.MULTILINE) == ["no"]
    (root,) = re.findall(r"REFITD_ROOT=(\S+)", UNIT)
    assert root == "/dev/shm/refitd/%i"  # noqa: S108
    (made,) = re.findall(r"^ExecStartPre=\+/usr/bin/install (.*)$", UNIT, re.MULTILINE)
    assert made.split()[-1] == root, "systemd makes no folder there"


@pytest.mark.parametrize("name", ["hub", "follower"])
def test_settings_of_hub_and_follower_are_refitds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DEPLOY / f"systemd/{name}.env").read_text()
    unit = (DEPLOY / "systemd/refitd.service").read_text() if name == "hub" else UNIT
    named = set(re.findall(r"REFITD_(\w+)=", text + "\n".join(re.findall(r"^Environment=.*", unit, re.MULTILINE))))
    assert {each.lower() for each in named} <= Settings.model_fields.keys()
    (tmp_path / "token").write_text("x")
    for variable, value in re.findall(r"^(REFITD_\w+)=(.*)$", text, re.MULTILINE):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("REFITD_ROOT", str(tmp_path))
    for variable in ("REFITD_TOKEN_FILE", *(["REFITD_FOLLOW_TOKEN_FILE"] if name == "follower" else [])):
        assert f"{variable}=/etc/refitd/" in unit
        monkeypatch.setenv(variable, str(tmp_path / "token"))
    settings = Settings()  # pyright: ignore[reportCallIssue]
    assert settings.follow == (["http://hub.example:8700"] if name == "follower" else [])
    assert settings.engines == (["http://127.0.0.1:30000"] if name == "follower" else [])


# One process a node, as of the real one; what differs between nodes, but for names, are ports of one machine here.
SRUN = """#!/bin/bash
echo "$@" >> started
case " $* " in *" sglang.launch_server "*) exec sleep 100;; esac
while [[ $1 == --* ]]; do case $1 in --nodelist=*) list=${1#*=};; esac; shift; done
IFS=, read -ra nodes <<< "$list"
read -ra engines <<< "$ENGINE_PORTS"; read -ra followers <<< "$FOLLOWER_PORTS"
for n in "${!nodes[@]}"; do
  export SLURMD_NODENAME=${nodes[n]} SLURM_NODEID=$n ENGINE_PORT=${engines[n]} FOLLOWER_PORT=${followers[n]}
  "$@" 2>> "node-$n.log" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM
for pid in "${pids[@]}"; do while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done; done
"""
TRAINER = """
import os, sys, time, httpx
from pathlib import Path
from refitd_client import WeightPublisher
from support.checkpoints import tensors
url, token = os.environ["REFITD_URL"], Path(os.environ["REFITD_TOKEN_FILE"]).read_text().strip()
with WeightPublisher(os.environ["REFITD_ROOT"], os.environ["REFITD_RUN"]) as publisher:
    publisher.publish(tensors(1), step=1)
ends, serve = time.monotonic() + 200, []
while len(serve) < 2 and time.monotonic() < ends:
    try:
        told = httpx.get(f"{url}/v1/hosts", headers={"Authorization": f"Bearer {token}"}).json()["items"]
        serve = sorted(each["told"]["follower"] for each in told if each["told"]["serves"] == "grpo~v000001")
    except httpx.HTTPError:
        pass
    time.sleep(0.1)
print("followers:", serve, sorted(path.name for path in Path(os.environ["MEMORY"]).iterdir()))
sys.exit(7)
"""


def run_job(folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run it to its end; its exit status, and all that it and its steps have said."""
    command, log = ["bash", str(JOB), sys.executable, "-c", TRAINER], folder / "job.log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        status = job.wait(280)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # it is the group's number as long as any of the job's processes runs
    return status, "".join(path.read_text() for path in sorted(folder.glob("*.log")))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_job_of_many_hosts_pulls_what_its_trainer_publishes_onto_each_node_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    commands = {
        tmp_path / "slurm/scontrol": "#!/bin/sh\nprintf '127.0.0.1\\nengine-1\\nengine-2\\n'\n",
        tmp_path / "slurm/srun": SRUN,
        tmp_path / "venv/bin/refitd": f'#!/bin/sh\nexec {sys.executable} -m refitd "$@"\n',
        tmp_path / "venv/bin/activate": f"PATH={tmp_path}/venv/bin:$PATH\n",
    }
    for path, script in commands.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
    with scripted_sglang() as one, scripted_sglang() as other:
        environment = {
            "PATH": f"{tmp_path / 'slurm'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "VENV": str(tmp_path / "venv"),
            "MODEL": str(write_model(tmp_path / "model")),
            "MEMORY": str(memory),
            "RUN": "grpo",
            "HUB_PORT": str(free_port()),
            "ENGINE_PORTS": " ".join(engine.url.rpartition(":")[2] for engine in (one, other)),
            "FOLLOWER_PORTS": f"{free_port()} {free_port()}",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "TMPDIR": str(tmp_path),
        }
        status, said = run_job(tmp_path, environment)
        assert status == 7, said
        assert "followers: ['engine-1', 'engine-2'] ['refitd-1-0', 'refitd-1-1']" in said
        assert all("grpo/v000001" in json.dumps(engine.served) for engine in (one, other))
    assert list(memory.iterdir()) == [], "a node's memory is free again"
    assert not list(tmp_path.glob("tmp.*")), "the keys are gone"
    started = (tmp_path / "started").read_text()
    a_task_a_node = r"^--nodes=2 --ntasks=2 --ntasks-per-node=1 .*--nodelist=engine-1,engine-2 "
    assert len(re.findall(a_task_a_node, started, re.MULTILINE)) == 2, "the engines, and the followers"
