"""kill -9 at every file-system step of a pull: the next one goes on with the files that had arrived whole, and believes
none of them.
"""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from refitd_client.contract import manifest
from refitd_hosts.follow import puller
from support import killed_pulls
from support.checkpoints import publish, tensors
from support.killed_pulls import FolderSource, pull, small_blocks
from support.published import leftovers, versions


@pytest.fixture
def hub(tmp_path: Path) -> Generator[Path]:
    before = puller.BLOCK
    publish(tmp_path / "hub", "run", 1, tensors(1))
    small_blocks(tmp_path / "hub")
    yield tmp_path / "hub"
    puller.BLOCK = manifest.BLOCK = before


def killed(tmp_path: Path, hub: Path) -> list[Path]:
    """The roots that kills leave."""
    roots = tmp_path / "roots"
    roots.mkdir()
    script = Path(killed_pulls.__file__)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    subprocess.run([sys.executable, "-W", "ignore", script, roots, hub], check=True, env=environment)
    return sorted(path for path in roots.iterdir() if path.is_dir())[:-1]  # the last pull came through


def arrived(root: Path) -> list[tuple[str, int]]:
    """The parts that had arrived when it was killed."""
    log = root.with_suffix(".parts")
    lines = log.read_text().splitlines() if log.exists() else []
    return [(file, int(start)) for file, start in (line.rsplit(" ", 1) for line in lines)]


def content(folder: Path) -> dict[str, bytes]:
    """The files of a version."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pull_that_is_killed_at_any_step_pulls_no_file_again_that_had_arrived(tmp_path: Path, hub: Path) -> None:
    """No version is there that is not whole, and nothing of the pull stays."""
    lost: list[int] = []
    for root in killed(tmp_path, hub):
        run = root / "run"
        before, source = arrived(root), FolderSource(hub)
        if not run.exists() or not versions(run):
            pull(root, source)
            assert leftovers(run) == [], f"killed at effect {root.name}"
        lost.append(len({file for file, _ in before} & {file for file, _ in source.parts}))
        assert lost[-1] <= 1, f"killed at effect {root.name}"  # one file is under way at a time
        assert content(run / "v000001") == content(hub / "run" / "v000001"), f"killed at effect {root.name}"
    print(f"killed at {len(lost)} effects, of which {sum(lost)} cost a file")
    assert len(lost) > 20
    assert sum(lost) < len(lost)


def test_bytes_that_changed_since_they_arrived_are_pulled_again(tmp_path: Path, hub: Path) -> None:
    """As after a power cut."""
    roots = killed(tmp_path, hub)
    root = max(roots, key=lambda each: (bool(leftovers(each / "run")) if (each / "run").exists() else False, each.name))
    (folder,) = leftovers(root / "run")
    for shard in (root / "run" / folder).glob("*.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    pull(root, FolderSource(hub))
    assert content(root / "run" / "v000001") == content(hub / "run" / "v000001")


def test_what_was_pulled_of_a_version_goes_when_it_is_not_wanted_any_more(tmp_path: Path, hub: Path) -> None:
    for root in killed(tmp_path, hub):
        if not (root / "run").exists():
            continue
        publish(hub / root.name, "run", 1, tensors(2))  # other contents, under the same name
        small_blocks(hub / root.name)
        if not versions(root / "run"):
            pull(root, FolderSource(hub / root.name))
            assert leftovers(root / "run") == []
            assert content(root / "run" / "v000001") == content(hub / root.name / "run" / "v000001")
        else:
            puller.drop_others(root, "run", ())
            assert leftovers(root / "run") == []
