"""Trainers' own folders: which run and step they are, and what says that they are complete."""

import json
import re
from pathlib import Path

import pytest

from refitd.root.scan import Listing, scan
from refitd_client.checkpoint.index import IndexOfDeltaError, lay_out, parse_index
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.validation.examine import structure
from refitd_client.validation.foreign import Trainer, inner_folders, is_foreign, recognise
from support.checkpoints import tensors, write_model, write_shards


def test_the_page_has_every_trainer_s_folder_and_what_completes_it() -> None:
    page = (Path(__file__).parents[3] / "docs/trainers.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| `<run>/([^`|]+?)/` \| ([^|]+) \|$", page, re.MULTILINE)
    each = [(name, row[1:]) for row in rows for name in re.findall("`(.+?)`", row[0])]
    told = {Trainer(name): row for name, row in each}
    assert told.keys() == set(Trainer)
    for trainer, (folder, complete) in told.items():
        found = recognise(f"run/{folder}", [trainer])
        assert found is not None, trainer
        assert (found.run, found.step) == ("run", 12)
        assert found.marker is None or f"`{found.marker.pattern}`" in complete


@pytest.mark.parametrize(
    ("path", "run", "step", "marker"),
    [
        ("slime/weight_v000012", "slime", 12, INDEX_NAME),
        ("slime/weight_v1000000", "slime", 1_000_000, INDEX_NAME),
        ("out/broadcasts/step_12", "out/broadcasts", 12, "STABLE"),
        ("grail/checkpoint-12/FULL", "grail", 12, "READY-*"),
        ("ckpt/ppo/global_step12_hf", "ckpt/ppo", 12, None),
        ("trl/checkpoint-12", "trl", 12, None),
        ("exp/trial/weight_update_v12", "exp/trial", 12, None),
    ],
)
def test_a_trainer_s_folder_says_run_step_and_marker(path: str, run: str, step: int, marker: str | None) -> None:
    found = recognise(path)
    assert found is not None
    assert (found.run, found.step) == (run, step)
    assert (None if found.marker is None else found.marker.pattern) == marker
    assert is_foreign(path)


@pytest.mark.parametrize(
    "path",
    [
        *("weight_v000012", "a/weight_v12", "a/step_07", "a/step_", "a/checkpoint-x", "a/v000012", "a/step_1/x"),
        *("a/FULL", "a/best_global_step1_hf", f"a/step_{'9' * 30}", "checkpoint-1/FULL", "a/weight_update"),
    ],
)
def test_what_is_called_otherwise_is_no_trainer_s(path: str) -> None:
    assert recognise(path) is None


def test_only_the_trainers_that_the_operator_names_count() -> None:
    assert recognise("a/step_1", [Trainer.SLIME]) is None
    assert inner_folders("a/checkpoint-1", [Trainer.TRANSFORMERS]) == ["a/checkpoint-1"]
    assert inner_folders("a/checkpoint-1", [Trainer.GRAIL]) == ["a/checkpoint-1/FULL"]


def listed(root: Path, *trainers: Trainer) -> list[str]:
    found = scan(root, trainers)
    assert isinstance(found, Listing)
    return [each.path for each in found.found]


def test_a_part_of_a_run_s_name_may_be_called_like_a_checkpoint(tmp_path: Path) -> None:
    write_model(tmp_path / "exp/step_3/v000001")
    write_model(tmp_path / "exp/step_4")
    (tmp_path / "exp/step_5").mkdir()
    assert listed(tmp_path, *Trainer) == ["exp/step_3/v000001", "exp/step_4"]
    assert listed(tmp_path) == ["exp/step_3/v000001"]


def test_a_link_in_place_of_a_trainer_s_folder_is_not_followed(tmp_path: Path) -> None:
    write_model(tmp_path / "elsewhere")
    (tmp_path / "root/run/checkpoint-1").mkdir(parents=True)
    (tmp_path / "root/run/step_1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/run/checkpoint-1/FULL").symlink_to(tmp_path / "elsewhere")
    found = listed(tmp_path / "root", *Trainer)
    assert all(structure(tmp_path / "root", path).faults for path in found)
    assert "run/step_1" not in found


def test_what_is_written_last_is_awaited_and_named(tmp_path: Path) -> None:
    write_model(tmp_path / "run/step_1")
    assert "STABLE" in (structure(tmp_path, "run/step_1").awaits or "")
    (tmp_path / "run/step_1/STABLE").touch()
    assert structure(tmp_path, "run/step_1").awaits is None


def test_grail_says_in_the_folder_above_that_it_is_ready(tmp_path: Path) -> None:
    write_model(tmp_path / "run/checkpoint-7/FULL")
    assert structure(tmp_path, "run/checkpoint-7/FULL").awaits is not None
    (tmp_path / "run/checkpoint-7/READY-8").touch()
    assert structure(tmp_path, "run/checkpoint-7/FULL").awaits is None


def test_a_shard_that_is_whole_is_not_a_checkpoint_while_its_name_says_that_there_are_more(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "run/checkpoint-1", tensors(1))
    (folder / INDEX_NAME).unlink()
    assert lay_out([path.name for path in folder.iterdir()], None).faults == ()
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in (structure(tmp_path, "run/checkpoint-1").reason or "")


@pytest.mark.parametrize("metadata", [{"delta_encoding": "xor"}, {"delta_encoding": "overwrite", "version": "000002"}])
def test_a_delta_of_slime_s_is_refused_as_one(metadata: dict[str, str]) -> None:
    with pytest.raises(IndexOfDeltaError, match="full checkpoints"):
        parse_index(json.dumps({"metadata": metadata, "weight_map": {"a": "a.safetensors"}}).encode())


@pytest.mark.parametrize("metadata", [{}, [], 7, None, {"total_size": 1, "nested": [{}]}])
def test_an_index_may_have_any_other_metadata(metadata: object) -> None:
    assert parse_index(json.dumps({"metadata": metadata, "weight_map": {}}).encode()).files == []
