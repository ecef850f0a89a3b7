"""Every command that a page shows is run: in the page's order, in one shell, against a real service and real engines.

What cannot be run says so above itself, with the reason (`blocks.py`), and is looked at by `test_docs_blocks.py`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from blocks import EXECUTABLE, PAGES, Block, blocks_of, lines_of, name_of
from elsewhere import Elsewhere, free_ports
from givens import CONFIGURATIONS, GIVENS, Given

from support.servers import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]

HERE = Path(__file__).parent
IN_RANKS = "docs/publishing.md"  # test_docs_publishing.py runs it, in as many ranks as it speaks of
START_THEIR_OWN = {"docs/quickstart.md", "docs/many-hosts.md"}  # engines, that is; the others share three
LONGEST = 400.0  # seconds, for a page, on a machine that is busy with other tests


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that are run, and those that are files for them."""
    if name_of(page) == IN_RANKS:
        return []
    return [
        block for block in blocks_of(page) if block.saved_as or (block.language in EXECUTABLE and not block.not_run)
    ]


class Engines(Server):
    """Three engines in one process, without keys."""

    name = "engines"

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        self.model = model
        self.port = free_ports(3)[0]
        self.ready = re.compile(rf" ready on http://127\.0\.0\.1:{self.port + 2}$".encode())  # the last of them

    def command(self, port: int) -> Sequence[str]:
        embedded = [sys.executable, "-m", "refitd_embedded"]
        return [*embedded, "--model-path", str(self.model), "--port", str(port), "--replicas", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, "-m", "refitd_embedded", "--make-model", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Engines]:
    """For all pages but the one that starts its own."""
    with Engines(tmp_path_factory.mktemp("engines"), model) as server:
        yield server


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where a page is run."""

    folder: Path
    elsewhere: Elsewhere
    given: Given

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def prepare(self, blocks: Sequence[Block], model: Path) -> None:
        """Make what the page names: the command, folders that services watch, models."""
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "refitd").symlink_to(HERE / "refitd_shim")
        self.home.mkdir()
        (self.folder / "tmp").mkdir()
        # A refusal is a failure, and its text is shown.
        (self.home / ".curlrc").write_text("fail-with-body\nno-progress-meter\n")
        (self.folder / "models").mkdir()
        text = self.given.before + "\n".join(block.text for block in blocks)
        for name in {"tiny", *re.findall(r"/models/([\w.-]+)", text)}:
            self._make_model(name, model)
        for root in re.findall(r"(?:--root |Publisher\(\")(/[\w/]+)", text):
            (self.folder / root[1:]).mkdir(parents=True, exist_ok=True)

    def _make_model(self, name: str, model: Path) -> None:
        place = self.folder / "models" / name
        if (configuration := CONFIGURATIONS.get(name)) is None:
            place.symlink_to(model)
        else:
            place.mkdir()
            (place / "config.json").write_text(json.dumps(configuration))

    def script(self, blocks: Sequence[Block]) -> str:
        """The page as one script, which says on its way where it is."""
        return "\n".join(["set -euo pipefail", self.elsewhere(self.given.before), *self._parts(blocks)])

    def _parts(self, blocks: Sequence[Block]) -> Iterator[str]:
        for block in blocks:
            yield f"echo '==== {block}' >&2"
            if block.saved_as:
                yield _here(block.saved_as, self.elsewhere(block.text))
            elif block.language == "python":
                yield _here(f"block-{block.line}.py", self.elsewhere(self.given.names + block.text))
                yield f"python block-{block.line}.py"
            elif block.language == "console":
                # A command that ends with another status than 0 is right if it says what the page says.
                commands = "\n".join(f"{{ {line}; }} || true" for line in lines_of(block))
                yield f"{{ {self.elsewhere(commands)}\n}} > $REFITD_DOCS_FOLDER/console-{block.line}.txt 2>&1"
            else:
                yield self.elsewhere(block.text)

    def environment(self) -> dict[str, str]:
        """What the page's shell finds: nothing of refitd's but where its service listens."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
        port = str(self.elsewhere.ports["8700"])
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        return kept | {
            "PATH": path,
            "HOME": str(self.home),
            "CURL_HOME": str(self.home),
            "USER": "somebody",
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.home / "state"),
            "OMP_NUM_THREADS": "1",
            "REFITD_PORT": port,
            "REFITD_URL": f"http://127.0.0.1:{port}",
            "REFITD_DOCS_FOLDER": str(self.folder),
            "REFITD_DOCS_PYTHON": sys.executable,
        }


def _here(file: str, text: str) -> str:
    return f"cat > {file} <<'END-OF-BLOCK'\n{text.rstrip()}\nEND-OF-BLOCK"


def run(stage: Stage, script: str) -> tuple[int | str, str]:
    """Run the script and end whatever it left behind; its status, and what it said."""
    log = stage.folder / "said.txt"
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=stage.home,
            env=stage.environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        )
        try:
            status: int | str = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            status = f"not done after {LONGEST:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text(errors="replace")


def test_what_is_known_of_pages_is_of_pages_that_there_are() -> None:
    assert {*GIVENS, IN_RANKS, *START_THEIR_OWN} <= {name_of(page) for page in PAGES}


def test_the_page_that_is_run_in_ranks_shows_nothing_but_python() -> None:
    shown = [block for page in PAGES if name_of(page) == IN_RANKS for block in blocks_of(page)]
    assert {block.language for block in shown} == {"python"}
    assert not any(block.not_run for block in shown)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_the_commands_of_a_page_do_what_it_says(
    page: Path, model: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    given, blocks = GIVENS.get(name_of(page), Given()), runnable(page)
    service, front, other, third, *own = free_ports(7)
    engine = own[0] if name_of(page) in START_THEIR_OWN else request.getfixturevalue("engines").port
    ports = {"8700": service, "8701": other, "8702": third, "31000": front, "31001": other}
    ports |= {str(30000 + number): engine + number for number in range(3)}
    stage = Stage(folder=tmp_path, elsewhere=Elsewhere(folder=tmp_path, ports=ports, words=given.words), given=given)
    stage.prepare(blocks, model)
    status, said = run(stage, stage.script(blocks))
    for block in blocks:  # first: what went wrong in one of them is why a later command fails
        shown, heard = stage.elsewhere(block.text), tmp_path / f"console-{block.line}.txt"
        if block.language == "console" and heard.exists():
            assert not list(missing(shown, heard.read_text())), f"{block}: {heard.read_text()}"
    assert status == 0, "\n".join(said.splitlines()[-60:])


def missing(shown: str, said: str) -> Iterator[str]:
    """What a console block shows and its commands did not say. An ellipsis stands for anything."""
    told = _even(said)
    for line in shown.splitlines():
        if not line.startswith("$ "):
            yield from (part for part in map(_even, line.split("…")) if part not in told)


def _even(text: str) -> str:
    return " ".join(text.split())
