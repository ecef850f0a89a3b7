"""From files on disk to a verdict: each way in which a checkpoint can be broken, and those that are only unusual."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from refitd_client import WeightPublisher
from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.index import MAX_INDEX_BYTES
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, Order
from refitd_client.validation import contents, examine
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.reference import read_reference
from refitd_client.validation.validate import Invalid, Options, Unknown, Valid, Verdict, validate
from support.rawfiles import EMBED, HEAD, NORM, bf16, f32, manifest_for, model, one_file, raw, shard_name, sharded

PATH = "run/v000001"
ONE, TWO = shard_name(1, 2), shard_name(2, 2)
WEIGHTS = "model.safetensors"
EXPECTED = Options(run="run", order=Order(1, 1))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return read_reference(one_file(tmp_path / "base", model()))


@pytest.fixture
def judged(root: Path, reference: Reference) -> Callable[..., Verdict]:
    def judge(options: Options = EXPECTED) -> Verdict:
        return validate(examine.examine(root, PATH, reference, options), reference, options)

    return judge


def two_shards(root: Path) -> Path:
    tensors = model()
    return sharded(root / PATH, {EMBED: tensors[EMBED]}, {NORM: tensors[NORM], HEAD: tensors[HEAD]})


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


Judged = Callable[..., Verdict]


def refused(verdict: Verdict, code: Code, *says: str) -> None:
    assert isinstance(verdict, Invalid), verdict
    assert verdict.code is code
    for part in says:
        assert part in verdict.reason


def test_one_file_and_shards_are_valid_with_the_same_inventory(root: Path, judged: Judged) -> None:
    one_file(root / PATH, model())
    single = judged()
    (root / PATH).rename(root / "old")
    two_shards(root)
    several = judged()
    assert isinstance(single, Valid)
    assert isinstance(several, Valid)
    assert single.inventory == several.inventory


def test_weights_alone_are_valid(root: Path, judged: Judged) -> None:
    (one_file(root / PATH, model()) / "config.json").unlink()
    assert isinstance(judged(), Valid)


def test_a_published_version_is_valid(root: Path, judged: Judged) -> None:
    manifest = manifest_for(two_shards(root), model())
    found = judged()
    assert isinstance(found, Valid)
    assert found.digest == manifest.digest


def test_a_stray_shard_beside_the_index_is_noted(root: Path, judged: Judged) -> None:
    (two_shards(root) / "old.safetensors").write_bytes(b"torn")
    found = judged()
    assert isinstance(found, Valid)
    assert "old.safetensors" in found.notes[0]


def test_a_stray_shard_without_an_index_counts(root: Path, judged: Judged) -> None:
    one_file(root / PATH / "stray", {NORM: model()[NORM]})
    (root / PATH / "stray" / WEIGHTS).rename(root / PATH / "stray.safetensors")
    one_file(root / PATH, model())
    refused(judged(), Code.DUPLICATE_TENSOR, NORM, WEIGHTS, "stray.safetensors")


def test_old_shards_and_their_index_beside_a_newer_single_file_are_refused(root: Path, judged: Judged) -> None:
    one_file(two_shards(root), model())
    refused(judged(), Code.TWO_SAVES, INDEX_NAME, WEIGHTS, " UTC)")


def test_a_file_that_only_vllm_would_read_is_refused(root: Path, judged: Judged) -> None:
    (two_shards(root) / "consolidated.safetensors").write_bytes(b"unread")
    refused(judged(), Code.TWO_SAVES, "consolidated.safetensors")


def test_a_torn_file_is_refused_by_name(root: Path, judged: Judged) -> None:
    halve(two_shards(root) / TWO)
    refused(judged(), Code.TORN_FILE, TWO, "it is not written to its end")


def test_a_missing_shard_is_refused_by_name(root: Path, judged: Judged) -> None:
    (two_shards(root) / TWO).unlink()
    refused(judged(), Code.MISSING_FILE, TWO)


def test_garbage_is_refused(root: Path, judged: Judged) -> None:
    (one_file(root / PATH, model()) / WEIGHTS).write_bytes(b"\xa5" * 5000)
    refused(judged(), Code.BAD_HEADER, WEIGHTS)


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        ({NORM: None}, Code.MISSING_TENSOR, NORM),
        ({NORM: bf16(5)}, Code.WRONG_SHAPE, NORM),
        ({NORM: f32(4)}, Code.WRONG_DTYPE, NORM),
        ({"model.bogus": bf16(5)}, Code.EXTRA_TENSOR, "model.bogus"),
        ({NORM: bf16(4, value=0x7FC0)}, Code.NON_FINITE, NORM),
        ({EMBED: None, NORM: None}, Code.MISSING_TENSOR, EMBED),
    ],
)
def test_tensors_that_an_engine_would_swallow_or_die_of_are_refused(
    root: Path, judged: Judged, change: dict[str, object], code: Code, name: str
) -> None:
    tensors = {key: value for key, value in (model() | change).items() if value is not None}
    one_file(root / PATH, tensors)  # type: ignore[arg-type]
    refused(judged(), code, name)


def test_an_index_that_disagrees_is_refused(root: Path, judged: Judged) -> None:
    index = two_shards(root) / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {EMBED: TWO, NORM: TWO, HEAD: ONE}}))
    refused(judged(), Code.INDEX_MISMATCH, EMBED, TWO)


def test_an_index_that_is_none_is_refused(root: Path, judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    index = two_shards(root) / INDEX_NAME
    index.write_text('{"weight_map":')
    refused(judged(), Code.BAD_INDEX, INDEX_NAME)
    monkeypatch.setattr(examine, "MAX_INDEX_BYTES", 100)
    index.write_bytes(b" " * 101)
    refused(judged(), Code.BAD_INDEX, "at most 100")
    assert MAX_INDEX_BYTES > 100


def test_links_and_fifos_in_place_of_shards_are_refused(root: Path, judged: Judged, tmp_path: Path) -> None:
    shard = two_shards(root) / TWO
    shard.rename(tmp_path / "real")
    shard.symlink_to(tmp_path / "real")
    refused(judged(), Code.NOT_REGULAR, TWO, "symbolic link")
    shard.unlink()
    os.mkfifo(shard)
    refused(judged(), Code.NOT_REGULAR, TWO, "FIFO")


def test_a_link_in_place_of_the_version_is_refused(root: Path, judged: Judged, tmp_path: Path) -> None:
    one_file(tmp_path / "elsewhere", model())
    (root / "run").mkdir()
    (root / PATH).symlink_to(tmp_path / "elsewhere")
    refused(judged(), Code.NOT_REGULAR, "v000001")


def test_a_sparse_petabyte_is_refused_without_reading_it(root: Path, judged: Judged) -> None:
    size = 2**43
    header = json.dumps({NORM: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = one_file(root / PATH, {}) / WEIGHTS
    path.write_bytes(raw(header))
    os.truncate(path, 8 + len(header) + size)
    refused(judged(), Code.WRONG_SHAPE, NORM)


def test_a_manifest_that_is_none_is_refused(root: Path, judged: Judged) -> None:
    (two_shards(root) / MANIFEST_NAME).write_text("{")
    refused(judged(), Code.BAD_MANIFEST, MANIFEST_NAME)


def test_a_flipped_byte_under_a_manifest_is_refused_by_name(root: Path, judged: Judged) -> None:
    folder = two_shards(root)
    manifest_for(folder, model())
    with (folder / TWO).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3e")
    refused(judged(), Code.MANIFEST_MISMATCH, TWO)


def test_a_file_that_the_manifest_names_is_read_even_if_it_is_no_weights(root: Path, judged: Judged) -> None:
    folder = two_shards(root)
    (folder / "tokenizer.json").write_text("{}")
    manifest_for(folder, model())
    (folder / "tokenizer.json").write_text("[]")
    refused(judged(), Code.MANIFEST_MISMATCH, "tokenizer.json")


def test_a_sparse_petabyte_beside_the_weights_is_refused_without_reading_it(root: Path, judged: Judged) -> None:
    """It would be read to its end, block by block, for days."""
    folder = two_shards(root)
    (folder / "tokenizer.json").write_text("{}")
    manifest_for(folder, model())
    os.truncate(folder / "tokenizer.json", 2**43)
    said = json.loads((folder / MANIFEST_NAME).read_text())
    said["files"]["tokenizer.json"]["size"] = 2**43
    (folder / MANIFEST_NAME).write_text(json.dumps(said))
    refused(judged(), Code.MANIFEST_MISMATCH, "tokenizer.json")


def test_a_folder_that_is_gone_is_unknown(judged: Judged) -> None:
    found = judged()
    assert isinstance(found, Unknown)
    assert PATH in found.reason


def test_an_io_error_is_unknown(root: Path, judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    one_file(root / PATH, model())

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    found = judged()
    assert isinstance(found, Unknown)
    assert "Input/output error" in found.reason


@pytest.mark.parametrize("change", ["rewritten", "added"])
def test_a_change_while_it_is_read_is_unknown(
    root: Path, judged: Judged, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = one_file(root / PATH, model())
    real = contents.read_contents

    def read(*args: object, **named: object) -> object:
        result = real(*args, **named)  # type: ignore[arg-type]
        name = WEIGHTS if change == "rewritten" else "more.safetensors"
        (folder / name).write_bytes(b"other")
        return result

    monkeypatch.setattr(examine, "read_contents", read)
    found = judged()
    assert isinstance(found, Unknown)
    assert found.code is Code.CHANGED


def test_a_look_tells_what_is_not_complete_yet(root: Path) -> None:
    folder = two_shards(root)
    halve(folder / TWO)
    seen = examine.structure(root, PATH)
    assert seen.reason is not None
    assert TWO in seen.reason
    two_shards(root)
    seen = examine.structure(root, PATH)
    assert (seen.reason, seen.has_manifest) == (None, False)
    assert seen.signature == examine.signature(root, PATH)


def test_a_glance_says_whose_version_it_is_and_reads_neither_index_nor_headers(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        folder = publisher.publish({"w": np.zeros(3, np.float32)}, step=1).path
    before = examine.structure(tmp_path, PATH)
    for path in folder.iterdir():
        if path.name != "refit.json":
            path.write_text("no header")
    seen = examine.glance(tmp_path, PATH)
    assert (seen.manifest, seen.has_manifest, seen.faults) == (before.manifest, True, ())
    assert seen.signature == examine.signature(tmp_path, PATH) != before.signature


def test_a_look_does_not_read_weights(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_shards(root)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read"))
    assert examine.structure(root, PATH).faults == ()


def test_a_growing_shard_is_incomplete_and_no_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = two_shards(root)
    real = os.open

    def grow(path: object, *args: object, **named: object) -> int:
        if path == TWO:
            with (folder / TWO).open("ab") as file:
                file.write(b"more")
        return real(path, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", grow)
    seen = examine.structure(root, PATH)
    assert [fault.code for fault in seen.faults] == [Code.CHANGED]


def test_reading_stops_when_told(root: Path, reference: Reference) -> None:
    one_file(root / PATH, model())
    stop = Event()
    stop.set()
    with pytest.raises(ReadingStoppedError):
        examine.examine(root, PATH, reference, EXPECTED, stop=stop)


def test_what_was_seen_is_not_parsed_again_while_the_files_are_the_same(
    root: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_for(two_shards(root), model())
    seen = examine.structure(root, PATH)
    monkeypatch.setattr(examine, "read_header", lambda *_: pytest.fail("parsed"))
    found = examine.examine(root, PATH, reference, EXPECTED, seen=seen)
    assert found.structure is seen
    assert isinstance(validate(found, reference, EXPECTED), Valid)


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))


def replaced(folder: Path) -> None:
    """Another folder of the same name, which holds the same files."""
    other = folder.with_name("other")
    folder.rename(other)
    folder.mkdir()
    for file in other.iterdir():
        file.rename(folder / file.name)


def linked(path: Path) -> None:
    target = path.rename(path.with_name("target.json"))
    path.symlink_to(target)


MEANWHILE: dict[str, Callable[[Path], object]] = {
    "a shard rewritten": lambda folder: rewrite(folder / ONE),
    "the index rewritten": lambda folder: rewrite(folder / INDEX_NAME),
    "the manifest rewritten": lambda folder: rewrite(folder / MANIFEST_NAME),
    "a tokenizer rewritten": lambda folder: rewrite(folder / "tokenizer.json"),
    "a tokenizer replaced by a link": lambda folder: linked(folder / "tokenizer.json"),
    "a shard added": lambda folder: (folder / "more.safetensors").touch(),
    "the folder replaced": replaced,
}


@pytest.mark.parametrize("change", MEANWHILE.values(), ids=MEANWHILE)
def test_what_changed_since_it_was_seen_is_looked_at_anew(
    root: Path, reference: Reference, change: Callable[[Path], object]
) -> None:
    folder = two_shards(root)
    (folder / "tokenizer.json").write_text("{}")
    manifest_for(folder, model())
    seen = examine.structure(root, PATH)
    change(folder)
    found = examine.examine(root, PATH, reference, EXPECTED, seen=seen)
    assert found.structure is not seen
    assert found.structure == examine.structure(root, PATH)
    anew = examine.examine(root, PATH, reference, EXPECTED)
    assert validate(found, reference, EXPECTED) == validate(anew, reference, EXPECTED)


@pytest.mark.parametrize(
    "doubt", [{"faults": (Defect(Code.CHANGED, "changed"),)}, {"awaits": "STABLE"}, {"path": "run/v000002"}]
)
def test_a_look_that_left_doubts_does_not_stand_in_for_another(
    root: Path, reference: Reference, doubt: dict[str, Any]
) -> None:
    two_shards(root)
    seen = replace(examine.structure(root, PATH), **doubt)
    found = examine.examine(root, PATH, reference, EXPECTED, seen=seen)
    assert found.structure == examine.structure(root, PATH)
    assert isinstance(validate(found, reference, EXPECTED), Valid)
