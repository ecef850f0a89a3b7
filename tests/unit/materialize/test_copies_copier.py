"""The materializer with real copies, versions and a store: what it does when the disk does not do as it is told."""

from pathlib import Path

from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.policy.materialize import MakeCopy
from refitd.reclaim.books import Books
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.materializer import Materializer
from support.deltas import chain, training
from support.records import engine


async def test_a_copy_that_cannot_be_deleted_is_not_forgotten_and_is_deleted_later(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with training(root) as trainer:
        versions = chain(trainer, root, 3)
    journal = Journal(tmp_path / "state")
    store, disk = Store(journal, SystemClock()), DiskCopies(root)
    targets = Targets(store)
    old, read = [await disk.write(MakeCopy(source=versions[0], deltas=tuple(versions[1:last]))) for last in (2, 3)]
    for record in versions:
        store.put_version(record)
    store.put_engine(engine("x", serving=versions[2].id, model_path=f"/mnt/{read.path}", configuration="known"))
    materializer = Materializer(store, targets, Books(store, targets, DiskFiles(root)), disk)
    stray = root / ".refitd/trash"
    stray.write_text("no folder")
    try:
        kept = {line.path: line.keep for line in await materializer.plan()}
        assert kept == {old.path: False, read.path: True}
        (line,) = [line for line in await materializer.sweep() if line.path == old.path]
        assert line.keep
        assert "no folder" in line.reasons[0]
        assert materializer.bytes_on_root == old.bytes + read.bytes > 0, "it was forgotten"
        assert targets.carriage.path_of(versions[1]) is None, "engines may not begin to load it"
        stray.unlink()
        await materializer.sweep()
        assert [found.path for found in await disk.survey()] == [read.path]
        assert materializer.bytes_on_root == read.bytes
    finally:
        journal.close()
