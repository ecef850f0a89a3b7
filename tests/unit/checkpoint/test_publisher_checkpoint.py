"""A checkpoint in a folder becomes a version of its own, which later changes to the folder do not reach."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from refitd_client import InvalidWeightsError, PublishError, PublishOptions, WeightPublisher
from refitd_client.checkpoint import header
from refitd_client.checkpoint.header import MAX_HEADER_BYTES
from refitd_client.contract.states import Kind
from refitd_client.files import durable
from support import published
from support.inside import in_process


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    """One without a base model."""
    with WeightPublisher(tmp_path / "root", "run") as publisher:
        yield publisher


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two shards, an index and what trainers put beside them."""
    folder = tmp_path / "saved"
    folder.mkdir()
    shards: dict[str, dict[str, Any]] = {"model-00001-of-00002.safetensors": {"a": np.ones(5, np.float32)}}
    shards["model-00002-of-00002.safetensors"] = {"b": np.zeros((2, 2), np.float16)}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    _index(folder, {tensor: name for name, tensors in shards.items() for tensor in tensors})
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "modeling_toy.py"):
        (folder / name).write_text(name)
    for name in ("optimizer.pt", "trainer_state.json", "training_args.bin", ".hidden.json", "refit.json", "README.md"):
        (folder / name).write_text(name)
    (folder / "global_step5").mkdir()
    return folder


def _index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _refused(publisher: WeightPublisher, folder: Path, why: str) -> None:
    with pytest.raises(InvalidWeightsError, match=why) as caught:
        publisher.publish(folder, step=1)
    assert str(folder) in str(caught.value)
    run = Path(in_process(publisher)._folder.path)
    assert published.versions(run) == published.leftovers(run) == []


def test_a_version_has_the_model_and_not_the_trainers_own_files(publisher: WeightPublisher, saved: Path) -> None:
    """Shards, configuration, tokenizer, code; no optimizer, logs or hidden files."""
    publication = publisher.publish(saved, step=1, metadata={"loss": "0.5"})
    manifest = published.check(publication.path)
    assert manifest.files.keys() == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "modeling_toy.py",
    }
    assert manifest.tensors.dtypes == {"F16": 1, "F32": 1}
    assert manifest.metadata == {"loss": "0.5"}
    assert np.array_equal(published.tensors(publication.path)["a"], np.ones(5, np.float32))


def test_a_folder_that_was_saved_to_twice_is_not_published(publisher: WeightPublisher, saved: Path) -> None:
    save_file({"w": np.ones(3)}, saved / "model.safetensors")
    with pytest.raises(
        InvalidWeightsError, match=r"two saves, model\.safetensors\.index\.json .* and model\.safetensors "
    ):
        publisher.publish(saved, step=1)


def test_a_trainer_that_saves_over_its_last_checkpoint_changes_no_version(
    publisher: WeightPublisher, saved: Path
) -> None:
    """In place, byte by byte: the version shares no file with the folder."""
    publication = publisher.publish(saved, step=1)
    for path in saved.iterdir():
        if path.is_file():
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
    published.check(publication.path)
    assert all(path.stat().st_nlink == 1 for path in publication.path.iterdir())


def test_a_clone_is_digested_as_it_is_published(
    publisher: WeightPublisher, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reflink is a file system's; here a copy stands for it that, like it, moves no file offset."""
    clones: list[int] = []

    def clone(source: int, target: int) -> bool:
        clones.append(target)
        os.pwrite(target, os.pread(source, 2**20, 0), 0)
        return True

    monkeypatch.setattr(durable, "clone", clone)
    published.check(publisher.publish(saved, step=1).path)
    assert len(clones) == 7


def test_the_links_of_a_hub_cache_become_plain_files(publisher: WeightPublisher, saved: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(saved.iterdir())):
        blob = path.rename(tmp_path / f"blob{number}")
        (snapshot / path.name).symlink_to(blob)
    publication = publisher.publish(snapshot, step=1)
    published.check(publication.path)
    assert not any(path.is_symlink() for path in publication.path.iterdir())


def test_a_published_version_can_be_published_again(publisher: WeightPublisher, saved: Path) -> None:
    first = publisher.publish(saved, step=1)
    again = publisher.publish(first.path, step=2)
    assert again.digest == first.digest
    assert published.check(again.path).step == 2


def test_a_base_model_lends_what_the_checkpoint_lacks(saved: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("the base's")
    (base / "vocab.json").write_text("the base's")
    save_file({"a": np.ones(5)}, base / "model.safetensors")
    with WeightPublisher(tmp_path / "root", "run", options=PublishOptions(base_model=base)) as publisher:
        folder = publisher.publish(saved, step=1).path
    assert (folder / "config.json").read_text() == "config.json"
    assert (folder / "vocab.json").read_text() == "the base's"
    assert not (folder / "model.safetensors").exists()


def test_a_base_model_that_is_no_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="Qwen/Qwen2"):
        WeightPublisher(tmp_path / "root", "run", options=PublishOptions(base_model="Qwen/Qwen2.5-0.5B"))
    assert not (tmp_path / "root").exists()


def test_an_empty_folder_is_refused(publisher: WeightPublisher, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _refused(publisher, tmp_path / "empty", "save the checkpoint there")
    _refused(publisher, tmp_path / "nowhere", "is not a folder")


def test_an_adapter_alone_is_a_version_of_its_own_kind(publisher: WeightPublisher, tmp_path: Path) -> None:
    """Without an index, which would send engines looking for a model."""
    save_file({"lora_A": np.ones(3)}, tmp_path / "adapter_model.safetensors")
    _refused(publisher, tmp_path, "adapter_config.json")
    for name in ("adapter_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    version = publisher.publish(tmp_path, step=1)
    assert version.kind is Kind.LORA
    assert version.notice.kind is Kind.LORA
    found = sorted(path.name for path in version.path.iterdir())
    assert found == ["adapter_config.json", "adapter_model.safetensors", "refit.json"]


@pytest.mark.parametrize("length", [0, 7, 20, -1])
def test_a_shard_that_is_cut_off_is_refused(publisher: WeightPublisher, saved: Path, length: int) -> None:
    """In its header or in its body, as one that is still being written is."""
    shard = saved / "model-00002-of-00002.safetensors"
    os.truncate(shard, length if length >= 0 else shard.stat().st_size - 1)
    _refused(publisher, saved, "cut off")


def test_a_header_that_the_service_would_not_read_is_not_published(publisher: WeightPublisher, tmp_path: Path) -> None:
    """In tensors, or in a checkpoint of somebody else's: it would be rejected when it is there."""
    with pytest.raises(InvalidWeightsError, match="set a smaller max_shard_bytes"):
        header.encode([], {"note": "x" * MAX_HEADER_BYTES})
    bad = b'{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}'
    (tmp_path / "model.safetensors").write_bytes(len(bad).to_bytes(8, "little") + bad + bytes(8))
    _refused(publisher, tmp_path, "dtype C64, which cannot be served")
    (tmp_path / "model.safetensors").write_bytes(b"\xa5" * 5000)
    _refused(publisher, tmp_path, "damaged or no safetensors file")


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "model-00001-of-00002.safetensors"},
        {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"},
        {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
        {},
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(
    publisher: WeightPublisher, saved: Path, weight_map: dict[str, str]
) -> None:
    (saved / "model-00001-of-00002.safetensors").unlink()
    save_file({"a": np.ones(5), "more": np.ones(1)}, saved / "model-00001-of-00002.safetensors")
    _index(saved, weight_map)
    _refused(publisher, saved, "index|no tensors")


def test_a_tensor_in_two_shards_is_refused(publisher: WeightPublisher, saved: Path) -> None:
    (saved / "model.safetensors.index.json").unlink()
    save_file({"a": np.ones(5)}, saved / "more.safetensors")
    _refused(publisher, saved, "tensor a is in model-00001-of-00002.safetensors and in more.safetensors")


def test_a_file_that_changes_while_it_is_copied_is_refused(
    publisher: WeightPublisher, saved: Path, tmp_path: Path
) -> None:
    """The copy would be of no state that the file ever had."""
    shard = saved / "model-00001-of-00002.safetensors"

    def touch(_: object) -> None:
        os.utime(shard)

    with pytest.raises(InvalidWeightsError, match="was written to while it was copied"):
        publisher.publish(saved, step=1, progress=touch)
    assert published.versions(tmp_path / "root" / "run") == []


def test_a_fifo_in_the_place_of_a_shard_stops_nobody(publisher: WeightPublisher, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    _refused(publisher, tmp_path, "model.safetensors is not a plain file")


def test_a_dangling_link_is_named(publisher: WeightPublisher, tmp_path: Path) -> None:
    """As an interrupted download leaves one in a cache."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    _refused(publisher, tmp_path, r"model\.safetensors cannot be read: No such file")


FULL = """
import subprocess, sys
from pathlib import Path
import numpy as np
from refitd_client import NoSpaceError, WeightPublisher
root, saved, options = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", root], check=True)
print("mounted", flush=True)
with WeightPublisher(root, "run") as publisher:
    for weights in ({"w": np.ones(2**20, np.uint8)}, saved):
        seen = []
        try:
            publisher.publish(weights, step=1, progress=seen.append)
        except NoSpaceError as error:
            assert "size" not in options or not seen
            print(error.needed > error.free or "quota" in str(error), sorted(p.name for p in (root / "run").iterdir()))
    if "size" in options:
        print(publisher.publish({"w": np.ones(2**10, np.uint8)}, step=1).version_id)
"""


@pytest.mark.parametrize("options", ["size=256k", "nr_inodes=6"])
def test_a_really_full_disk_is_reported_and_holds_no_half_version(tmp_path: Path, options: str) -> None:
    """Too few bytes, which is seen before writing; too few inodes, which is not."""
    (tmp_path / "root").mkdir()
    saved = tmp_path / "saved"
    saved.mkdir()
    save_file({"w": np.ones(2**19, np.uint8)}, saved / "model.safetensors")
    (saved / "config.json").write_text("{}")
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL]
    done = subprocess.run([*command, tmp_path / "root", saved, options], capture_output=True, text=True, check=False)
    if not done.stdout.startswith("mounted"):
        pytest.skip(f"cannot mount a file system of its own here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    left = "True ['.publisher.lock']"
    expected = [left, left, "run~v000001"] if "size" in options else [left, left]
    assert done.stdout.splitlines()[1:] == expected
