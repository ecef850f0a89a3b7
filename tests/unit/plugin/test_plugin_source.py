"""A version on disk is opened beneath the root, checked, and read as what was checked."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from refitd_client.validation.validate import Options
from refitd_plugin.memory.source import SourceRefusedError, mapped, open_version, place_of, started_from

WEIGHTS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.arange(7, dtype=torch.int64),
    "c": torch.tensor([True, False, True]),
    "d": torch.tensor(2.5),
    "e": torch.empty(0, 4),
    "f": torch.randn(4).to(torch.float8_e4m3fn),
}
ANYTHING = Options(allow_missing=("*.*",), allow_extra=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".refitd").mkdir()
    folder = tmp_path / "run" / "v000001"
    folder.mkdir(parents=True)
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def test_tensors_are_what_safetensors_reads(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    found = mapped(place_of(str(folder), None)).tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_loader_that_works_in_place_does_not_change_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    source = mapped(place_of(str(folder), None))
    source.tensors()["a"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_root_is_found_above_a_version(folder: Path, tmp_path: Path) -> None:
    assert place_of(str(folder), None).root == tmp_path
    assert place_of(str(folder), tmp_path / "run").path == "v000001"
    assert place_of(str(folder), Path("/elsewhere")).root == tmp_path


def test_a_run_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(folder.parent)
    with pytest.raises(SourceRefusedError, match="links are not followed"):
        open_version(place_of(str(tmp_path / "other" / "v000001"), None), None, ANYTHING, check_bytes=True)


def test_a_start_up_model_may_be_made_of_links(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert torch.equal(started_from(snapshot).tensors()["b"], WEIGHTS["b"])


def test_a_start_up_model_of_pickles_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SourceRefusedError, match="pickle"):
        started_from(tmp_path)


def test_a_fifo_is_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert mapped(place_of(str(folder), None)).structure.faults
