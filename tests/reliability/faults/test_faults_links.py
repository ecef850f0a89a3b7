"""Hard links: files of a version that have another name elsewhere, which is not ours and through which others write."""

import os
import shutil
from pathlib import Path

from faults.stand import Stand, Subject, id_of, standing, until
from support.jobs import RUN

SHARD = "model.safetensors"


def linked(stand: Stand, model: Path, own: Path, step: int) -> Path:
    """A trainer's own checkpoint in `own`, and a version that is made of hard links to it."""
    shutil.copytree(model, own)
    version = stand.root / RUN / f"v{step:06d}"
    version.mkdir(parents=True)
    for file in own.iterdir():
        os.link(file, version / file.name)
    stand.is_served(step)
    return own / SHARD


def test_hard_links_are_deleted_by_the_version_s_own_names_and_noticed_when_others_write(
    engine: Subject, tmp_path: Path
) -> None:
    with standing(tmp_path, engine, "--keep-last", "1") as stand:
        kept = linked(stand, engine.model(1), tmp_path / "kept", 1)
        stand.serve(engine.model(2), 2)
        until(lambda: stand.folders() == ["v000002"], "what nobody needs was not collected")
        assert kept.read_bytes() == (engine.model(1) / SHARD).read_bytes()
        until(lambda: kept.stat().st_nlink == 1, "the trash was not emptied")
        rewritten = linked(stand, engine.model(3), tmp_path / "rewritten", 3)
        with rewritten.open("r+b") as shard:
            shard.write((engine.models[0] / SHARD).read_bytes())
        again = stand.until(lambda event: event.subject == id_of(3) and "other contents" in event.text)
        stand.until(
            lambda event: event.subject == id_of(3) and event.text.startswith("sealed: "), after=again.seq
        )  # what is there now was checked before it was loaded
        stand.serve(engine.model(4), 4)
        assert engine.serves(4)
