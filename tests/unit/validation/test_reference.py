"""The model that checkpoints are held against, as the operator may have it on disk."""

import errno
import json
import os
from pathlib import Path

import pytest

from refitd_client.checkpoint.inventory import Tensor
from refitd_client.validation.reference import ReferenceRefusedError, read_reference
from support.rawfiles import EMBED, HEAD, NORM, Spec, bf16, model, one_file, safetensors, shard_name, sharded

TIED = {name: spec for name, spec in model().items() if name != HEAD}


def test_the_inventory_is_that_of_the_files(tmp_path: Path) -> None:
    found = read_reference(sharded(tmp_path / "base", {EMBED: bf16(8, 4)}, {NORM: bf16(4)}))
    assert {name: str(tensor) for name, tensor in found.inventory.tensors.items()} == {
        EMBED: str(Tensor("BF16", (8, 4))),
        NORM: str(Tensor("BF16", (4,))),
    }
    assert found.source == str(tmp_path / "base")


def test_links_are_followed_as_the_hugging_face_cache_has_them(tmp_path: Path) -> None:
    blobs = one_file(tmp_path / "blobs", model())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert set(read_reference(snapshot).inventory.tensors) == set(model())


@pytest.mark.parametrize(
    ("config", "tensors", "tied"),
    [
        ({"tie_word_embeddings": True}, model(), True),
        ({"tie_word_embeddings": False}, TIED, False),
        ({"text_config": {"tie_word_embeddings": True}}, model(), True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, model(), False),
        ({"thinker_config": {"text_config": {"tie_word_embeddings": True}}}, model(), True),
        ({"tie_word_embeddings": True, "time_step_limit": [0.0, float("inf")]}, model(), True),
        ({"text_config": {}}, model(), False),
        ({}, model(), False),
        ({}, TIED, True),
        (None, model(), False),
    ],
)
def test_the_config_says_whether_the_head_is_tied_else_the_tensors_do(
    tmp_path: Path, config: object, tensors: dict[str, object], tied: bool
) -> None:
    folder = one_file(tmp_path / "base", tensors)  # type: ignore[arg-type]
    if config is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(json.dumps(config))
    assert read_reference(folder).tied is tied


@pytest.mark.parametrize(("value", "copies"), [(0x3F80, {HEAD}), (0x4000, set())])
def test_a_head_beside_the_embedding_that_it_is_tied_to_is_a_copy_by_its_bytes(
    tmp_path: Path, value: int, copies: set[str]
) -> None:
    folder = sharded(tmp_path / "base", {EMBED: bf16(8, 4)}, {HEAD: bf16(8, 4, value=value)})
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    assert read_reference(folder).copies == copies


def test_faults_of_a_model_on_a_hub_that_loaders_pass_over_are_warnings(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "base", {EMBED: bf16(8, 4)}, {NORM: bf16(4)})
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    index["weight_map"]["mtp.fc.weight"] = shard_name(2, 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    twice: dict[str, Spec] = {EMBED: bf16(8, 4), NORM: bf16(4)}
    (folder / shard_name(2, 2)).write_bytes(safetensors(twice))
    found = read_reference(folder)
    assert set(found.inventory.tensors) == {EMBED, NORM}
    assert found.unstored == {"mtp.fc.weight"}
    assert any("mtp.fc.weight" in warning for warning in found.warnings)
    assert any(f"tensor {EMBED} is in {shard_name(1, 2)} and in {shard_name(2, 2)}" in each for each in found.warnings)


def test_the_index_of_an_earlier_save_of_the_model_is_a_warning(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "base", {EMBED: bf16(8, 4)}, {NORM: bf16(4)})
    for number in (1, 2):
        (folder / shard_name(number, 2)).unlink()
    one_file(folder, model())
    found = read_reference(folder)
    assert set(found.inventory.tensors) == set(model())
    assert "earlier save" in found.warnings[0]


def test_a_folder_that_cannot_be_looked_at_is_an_error_and_not_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stat = one_file(tmp_path / "base", model()), Path.stat

    def denied(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(PermissionError):
        read_reference(folder)


def test_a_name_on_a_hub_is_refused_with_the_setting() -> None:
    with pytest.raises(ReferenceRefusedError, match=r"--base-model \(REFITD_BASE_MODEL\)"):
        read_reference(Path("Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize("broken", ["torn", "config", "empty", "fifo", "index", "missing"])
def test_a_model_that_cannot_be_read_is_refused_and_named(tmp_path: Path, broken: str) -> None:
    folder = sharded(tmp_path / "base", {EMBED: bf16(8, 4)}, {NORM: bf16(4)})
    shard = folder / "model-00002-of-00002.safetensors"
    match broken:
        case "torn":
            os.truncate(shard, 30)
        case "config":
            (folder / "config.json").write_text("{")
        case "empty":
            folder = tmp_path
        case "fifo":
            shard.unlink()
            os.mkfifo(shard)
        case "index":
            (folder / "model.safetensors.index.json").write_text("{")
        case _:
            shard.unlink()
    with pytest.raises(ReferenceRefusedError, match=str(folder)):
        read_reference(folder)
