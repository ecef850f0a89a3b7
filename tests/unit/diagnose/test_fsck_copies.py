"""What fsck says of deltas and of the copies that they are applied to."""

import os
from pathlib import Path

from refitd.catalog.files import DiskFiles
from refitd.diagnose.fsck.compare import FsckFacts, compare
from refitd.diagnose.fsck.disagreement import Disagreement, FsckKind, Repair, Severity
from refitd.diagnose.fsck.disk import CopyFacts, DiskFacts, NoProgress, look_at_disk
from refitd.diagnose.journal import JournalFacts
from refitd.diagnose.roster import EngineFacts
from refitd.engine.port import Reached
from refitd.materialize.disk import DiskCopies
from refitd.policy.materialize import WriteCopy
from refitd.root.scan import FoundFolder, Listing
from refitd.state.copy import Copy
from refitd.state.journal.condition import Sound
from refitd.state.records import NEW
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind
from support.deltas import chain, training
from support.records import engine, version

COPY = Copy(run="run", name="a" * 32, path=".refitd/copies/run/a", order=Order(1, 2))
FULL, DELTA = version(1), version(2, kind=Kind.DELTA, base="run~v000001")


def found(*versions: VersionRecord, copies: tuple[CopyFacts, ...] = (), **journal: object) -> list[Disagreement]:
    listing = Listing(tuple(FoundFolder(run=v.run, order=v.order, path=v.path) for v in versions), frozenset({"run"}))
    disk = DiskFacts(listing=listing, signatures={v.path: v.signature for v in versions}, copies=copies)
    books = JournalFacts(path=Path("j"), condition=Sound(NEW), versions={v.id: v for v in versions}, **journal)  # type: ignore[arg-type]
    return compare(FsckFacts(journal=books, disk=disk))


def test_a_delta_with_its_base_and_a_copy_that_holds_it_are_as_they_should_be() -> None:
    assert found(FULL, DELTA, copies=(CopyFacts(copy=COPY),)) == []


def test_a_delta_that_stands_on_nothing_is_told() -> None:
    (finding,) = found(DELTA)
    assert (finding.kind, finding.severity) == (FsckKind.DELTA_BASELESS, Severity.WARNING)
    assert "its base run~v000001 was deleted" in finding.text


def test_a_copy_with_other_contents_than_its_note_says_is_disowned() -> None:
    (finding,) = found(FULL, DELTA, copies=(CopyFacts(copy=COPY, odd="tensor w is another"),))
    assert (finding.kind, finding.repair) == (FsckKind.COPY_DAMAGED, Repair.DISOWN_COPY)


def test_a_copy_whose_writing_was_cut_off_is_no_disagreement() -> None:
    half = Copy(run="run", name="b" * 32, path=".refitd/copies/run/b")
    foreign = Copy(run="run", name="x", path=".refitd/copies/run/x", fault="was not put there by this service")
    findings = found(FULL, copies=(CopyFacts(copy=half), CopyFacts(copy=foreign)))
    assert {finding.kind for finding in findings} == {FsckKind.COPY_UNFINISHED, FsckKind.FOREIGN}
    assert not any(finding.is_open for finding in findings)


def test_an_engine_that_serves_a_delta_names_the_copy_that_it_was_loaded_from() -> None:
    listing = Listing((FoundFolder(run="run", order=FULL.order, path=FULL.path),), frozenset({"run"}))
    disk = DiskFacts(listing=listing, signatures={v.path: v.signature for v in (FULL, DELTA)})
    path = "/root/.refitd/copies/run/a"
    record = engine("e", serving=DELTA.id, model_path=path)
    books = JournalFacts(
        path=Path("j"), condition=Sound(NEW), versions={v.id: v for v in (FULL, DELTA)}, engines={"e": record}
    )
    for label, path_now, agrees in (("2", path, True), ("3", path, False), ("2", "/models/base", False)):
        seen = Reached(
            model_path=path_now, weight_version=label, server_version="0.5.23", configuration="c", startup_path=None
        )
        facts = EngineFacts(id="e", url="http://e", root="/root", seen=seen, generates=True)
        findings = compare(FsckFacts(journal=books, disk=disk, engines=[facts]))
        assert (not findings) == agrees


def flip_behind_its_back(folder: Path) -> None:
    """With its time put back: only who reads it sees that."""
    shard = next(folder.glob("*.safetensors"))
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_a_flipped_byte_in_a_copy_is_found_by_reading_every_byte(tmp_path: Path) -> None:
    copies = DiskCopies(tmp_path)
    with training(tmp_path) as trainer:
        full, delta = chain(trainer, tmp_path, 2)
    copy = await copies.write(WriteCopy(target=delta, source=full, deltas=(delta,), into=None))

    async def odd() -> object:
        facts = await look_at_disk(
            tmp_path, DiskFiles(tmp_path), [full, delta], copies, deep=True, incoming_ttl=1.0, progress=NoProgress()
        )
        return facts.copies[0].odd

    assert await odd() is None
    flip_behind_its_back(tmp_path / copy.path)
    assert "is not what that version has" in str(await odd())
    await copies.disown(copy)
    assert [each.holds for each in await copies.survey()] == [None]
