"""deploy/systemd and deploy/slurm: a unit that systemd takes and that is contained, and a job that really runs."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from refitd.cli.app import Command, Group, app
from refitd.settings import Settings
from support.checkpoints import write_model
from support.sockets import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "systemd/refitd.service").read_text()
SETTINGS = (DEPLOY / "systemd/refitd.env").read_text()
FRONT_UNIT = (DEPLOY / "systemd/refitd-front@.service").read_text()
FRONT_SETTINGS = (DEPLOY / "systemd/refitd-front.env").read_text()
UNITS = {"refitd.service": UNIT, "refitd-front@grpo.service": FRONT_UNIT}
JOB = DEPLOY / "slurm/refit.sbatch"
MOST_EXPOSED = 20  # in tenths: what systemd-analyze security may say at most

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


def commands() -> dict[str, Command]:
    group = get_command(app)
    assert isinstance(group, Group)
    found = {name: group.get_command(None, name) for name in group.list_commands(None)}
    return {name: command for name, command in found.items() if isinstance(command, Command)}


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    unit = tmp_path / name
    unit.write_text(UNITS[name].replace("/opt/refitd/bin/refitd ", f"{sys.executable} -m refitd "))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_the_unit_is_contained(name: str, tmp_path: Path) -> None:
    def exposed(text: str) -> int:
        (tmp_path / name).write_text(text)
        words = ("security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager")
        done = subprocess.run(["systemd-analyze", *words, tmp_path / name], capture_output=True, text=True, check=False)
        return done.returncode

    assert exposed(UNITS[name]) == 0
    assert exposed(re.sub(r"^(Protect|Restrict|Private|System|Capab).*\n", "", UNITS[name], flags=re.MULTILINE)) != 0


def test_the_fronts_unit_runs_a_command_that_refitd_takes() -> None:
    (line,) = re.findall(r"^ExecStart=/opt/refitd/bin/refitd (.*)$", FRONT_UNIT, re.MULTILINE)
    (flags,) = re.findall(r"^FRONT_FLAGS=(.*)$", FRONT_SETTINGS, re.MULTILINE)
    first, *words = line.replace("$FRONT_FLAGS", flags).split()
    command = commands()[first]
    words += [
        f"--{name.lower()}={value}" for name, value in re.findall(r"^REFITD_(\w+)=(.*)$", FRONT_SETTINGS, re.MULTILINE)
    ]
    given = command.make_context(first, words).params
    assert (given["engine"], given["checkpoints"]) == (["http://127.0.0.1:30000=31000"], [Path("/srv/areal")])
    (root,) = re.findall(r"^ReadWritePaths=(.*)$", FRONT_UNIT, re.MULTILINE)
    assert f"RequiresMountsFor={root}\n" in FRONT_UNIT
    assert given["root"] == Path(root)
    named = {option.envvar for option in command.params}
    (line,) = re.findall(r"^Environment=(.*)$", FRONT_UNIT, re.MULTILINE)
    assert {word.partition("=")[0] for word in line.split()} - {"REFITD_TOKEN_FILE"} <= named


def test_the_fronts_user_owns_what_it_publishes_and_cannot_read_the_journal() -> None:
    """It is in the root's group, which reads the tokens too; the service's state is the service's user's alone."""
    (user,) = re.findall(r"^User=(.*)$", FRONT_UNIT, re.MULTILINE)
    (group,) = re.findall(r"^Group=(.*)$", FRONT_UNIT, re.MULTILINE)
    assert f"useradd --system --gid {group} " in FRONT_UNIT
    assert f" {user}\n" in FRONT_UNIT
    assert f"Group={group}\n" in UNIT
    assert f"User={user}\n" not in UNIT
    assert "StateDirectoryMode=0700\n" in UNIT
    assert "StateDirectory" not in FRONT_UNIT
    assert "UMask=0002\n" in FRONT_UNIT, "refitd has to be able to delete what it publishes"
    for token in re.findall(r"REFITD_FRONT_TOKEN_FILE=(\S+)", FRONT_UNIT):
        assert f"install -m 0640 -g {group} /dev/stdin {token}\n" in FRONT_UNIT


def test_the_units_settings_are_refitds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = re.findall(r"^#?REFITD_(\w+)=", SETTINGS, re.MULTILINE) + re.findall(r"REFITD_(\w+)=%?", UNIT)
    assert {name.lower() for name in named} <= Settings.model_fields.keys()
    token = tmp_path / "token"
    token.write_text("x")
    for name, value in re.findall(r"^(REFITD_\w+)=(.*)$", SETTINGS, re.MULTILINE):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REFITD_TOKEN_FILE", str(token))
    assert Settings().engines == ["http://127.0.0.1:30000"]  # pyright: ignore[reportCallIssue]


def test_shellcheck_finds_nothing_in_any_script() -> None:
    """The job, and what sets up environments: every file of the tree that a shell reads."""
    folders = ("deploy", "tests", ".ci")
    files = [file for folder in folders for file in (DEPLOY.parent / folder).rglob("*") if file.is_file()]
    scripts = [file for file in files if re.match(rb"#!/bin/(ba)?sh\n", file.read_bytes()[:20])]
    assert JOB in scripts
    program = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([program, *scripts], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


TRAINER = """
import os, sys, time, httpx
headers = {"Authorization": "Bearer " + open(os.environ["REFITD_TOKEN_FILE"]).read().strip()}
ends, engines = time.monotonic() + 60, []
while len(engines) < 2 and time.monotonic() < ends:
    try:
        engines = httpx.get(os.environ["REFITD_URL"] + "/v1/engines", headers=headers).json()["items"]
    except httpx.HTTPError:
        time.sleep(0.1)
print("engines:", sorted(engine["url"] for engine in engines), os.environ["REFITD_RUN"])
sys.exit(7)
"""
REFITD = f'exec {sys.executable} -m refitd "$@"'
FAILS_ONCE = f"[ -e failed ] || {{ touch failed; exit 9; }}\n{REFITD}"


def run_job(tmp_path: Path, refitd: str, trainer: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Slurm is two stand-ins here, `refitd` a script that may start the real one; shell and trainer are real."""
    slurm, venv = tmp_path / "slurm", tmp_path / "venv"
    commands = {
        slurm / "scontrol": "printf 'trainer\\nengine-1\\nengine-2\\n'",
        slurm / "srun": 'echo "$@" >> started; exec sleep 100',
        venv / "bin/refitd": refitd,
        venv / "bin/activate": f"PATH={venv}/bin:$PATH",
    }
    for path, script in commands.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    (tmp_path / "job").write_text(JOB.read_text().replace("8700", str(free_port())).replace("31000", str(free_pair())))
    environment = {
        "PATH": f"{slurm}:{os.environ['PATH']}",
        "VENV": str(venv),
        "MODEL": str(write_model(tmp_path / "model")),
        "RUN": "grpo",
        "SGLANG_ARGS": "--mem-fraction-static 0.4",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run(
        ["bash", tmp_path / "job", sys.executable, "-c", trainer],
        cwd=tmp_path,
        env=os.environ | environment | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_job_runs_the_service_and_the_trainer_and_ends_as_the_trainer_does(tmp_path: Path) -> None:
    done = run_job(tmp_path, FAILS_ONCE, TRAINER)
    log = (tmp_path / "refitd-1.log").read_text()
    assert done.returncode == 7, done.stderr + log
    assert "engines: ['http://engine-1:30000', 'http://engine-2:30000'] grpo" in done.stdout
    assert "refitd serve has ended with exit status 9: refitd-1.log says why" in done.stderr, "it was started again"
    assert '"event": "stopped"' in log
    assert (tmp_path / "started").read_text().count(" --mem-fraction-static 0.4\n") == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp.")], "the keys are gone"


ASKED = """
import os, pathlib, stat, time
asked = pathlib.Path("asked")
while not asked.exists():
    time.sleep(0.05)
words = asked.read_text().splitlines()
for flag in ("--state", "--token-file"):
    folder = pathlib.Path(words[words.index(flag) + 1])
    folder = folder.parent if flag == "--token-file" else folder
    print(flag, folder, oct(stat.S_IMODE(folder.stat().st_mode)))
"""


def test_another_user_cannot_guess_or_read_the_jobs_folders(tmp_path: Path) -> None:
    """In a shared temporary folder another user can make a folder or link first under a name that can be guessed."""
    refitd = """printf '%s\n' "$@" > asked.new; mv asked.new asked; exec sleep 100"""
    told = []
    for _ in range(2):
        (tmp_path / "asked").unlink(missing_ok=True)
        done = run_job(tmp_path, refitd, ASKED)
        assert done.returncode == 0, done.stderr
        told += [line.split() for line in done.stdout.splitlines() if line.startswith("--")]
    assert len({folder for _, folder, _ in told}) == 4
    assert {mode for _, _, mode in told} == {"0o700"}


def free_pair() -> int:
    """The first of two ports that nobody has, below those that the system gives to whoever does not choose."""
    for first in range(21_000, 32_000, 2):
        try:
            with socket.socket() as one, socket.socket() as other:
                one.bind(("127.0.0.1", first))
                other.bind(("127.0.0.1", first + 1))
        except OSError:
            continue
        return first
    raise AssertionError("there are no free ports")
