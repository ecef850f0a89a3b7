"""slime's and miles' disk updates: what they write becomes a version, and a delta that does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as save_weights

from refitd_client import InvalidWeightsError
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.trainers.slime import DiskUpdates
from support.published import versions
from support.slime_updates import FILE, Bytes, Weights, overwrite, write_delta, write_full, xor


def weights(seed: int) -> Weights:
    torch.manual_seed(seed)
    return {"a": torch.rand(4, 8).bfloat16(), "b": torch.rand(3), "scalar": torch.tensor(float(seed))}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """What the trainer was started with."""
    (tmp_path / "base").mkdir()
    save_weights(weights(0), tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def started(tmp_path: Path, base: Path) -> Callable[[Path], None]:
    """The hook as the trainer calls it."""
    hook, args = DiskUpdates(tmp_path / "root", "run"), SimpleNamespace(hf_checkpoint=str(base))
    return lambda folder: hook(args, str(folder), [])


def published(tmp_path: Path, name: str) -> Weights:
    files = sorted((tmp_path / "root/run" / name).glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def is_same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("encode", [xor, overwrite])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_each_delta_becomes_the_version_that_it_leads_to(
    encode: Any, checksum: str, base: Path, tmp_path: Path
) -> None:
    publish, folder = started(tmp_path, base), tmp_path / "updates"
    publish(folder)  # emptied by the trainer, before its first delta
    for number in (1, 2):
        place = write_delta(folder, number, weights(number - 1), weights(number), encode, checksum=checksum)
        publish(place)
        assert is_same(published(tmp_path, f"v{number:06d}"), weights(number))


def test_what_did_not_change_is_taken_from_the_base(base: Path, tmp_path: Path) -> None:
    publish, newer = started(tmp_path, base), weights(0) | {"b": torch.ones(3)}
    publish(write_delta(tmp_path / "updates", 1, weights(0), {"b": newer["b"]}))
    assert is_same(published(tmp_path, "v000001"), newer)


def test_a_delta_may_follow_a_full_update_that_the_trainer_has_deleted(base: Path, tmp_path: Path) -> None:
    publish, full = started(tmp_path, base), write_full(tmp_path / "updates", 1, weights(1))
    publish(full)
    for file in full.iterdir():
        file.unlink()
    publish(write_delta(tmp_path / "updates", 2, weights(1), weights(2)))
    assert is_same(published(tmp_path, "v000002"), weights(2))


def test_a_trainer_that_was_restarted_begins_again_with_its_base(base: Path, tmp_path: Path) -> None:
    publish = started(tmp_path, base)
    publish(write_delta(tmp_path / "one", 1, weights(0), weights(1)))
    publish(write_delta(tmp_path / "one", 2, weights(1), weights(2)))
    again = DiskUpdates(tmp_path / "other", "run", base_model=base)
    again(None, write_delta(tmp_path / "two", 1, weights(0), weights(3)))
    assert versions(tmp_path / "other/run") == ["v000001"]


@pytest.mark.parametrize("facts", [{"base_version": "000002"}, {"base_version": "000007"}])
def test_a_delta_of_another_version_is_refused(facts: dict[str, str], base: Path, tmp_path: Path) -> None:
    publish = started(tmp_path, base)
    publish(write_delta(tmp_path / "updates", 1, weights(0), weights(1)))
    with pytest.raises(InvalidWeightsError, match="whose weights are not here"):
        publish(write_delta(tmp_path / "updates", 3, weights(2), weights(3), **facts))
    assert versions(tmp_path / "root/run") == ["v000001"]


def test_a_delta_that_was_made_on_other_weights_is_refused_and_is_the_base_of_none(base: Path, tmp_path: Path) -> None:
    publish = started(tmp_path, base)
    publish(write_delta(tmp_path / "updates", 1, weights(0), weights(1)))
    with pytest.raises(InvalidWeightsError, match="does not lead to the checksum of tensor"):
        publish(write_delta(tmp_path / "updates", 2, weights(5), weights(2)))
    with pytest.raises(InvalidWeightsError, match="restart the trainer"):
        publish(write_delta(tmp_path / "updates", 3, weights(1), weights(3), base_version="000001"))
    assert versions(tmp_path / "root/run") == ["v000001"]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"delta_encoding": "nans"}, "this release of refitd knows xor/overwrite"),
        ({"compression_format": "lz4"}, "this release of refitd knows"),
        ({"checksum_format": "crc32"}, "this release of refitd knows"),
        ({"version": "000009"}, "says that it is version 000009"),
        ({"base_version": "first"}, "is no index of a delta of slime's"),
    ],
)
def test_a_delta_in_a_form_that_is_not_known_is_refused(
    facts: dict[str, str], said: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidWeightsError, match=said):
        started(tmp_path, base)(write_delta(tmp_path / "updates", 1, weights(0), weights(1), **facts))


def short(_: Bytes, new: Bytes) -> Bytes:
    return new[:-1]


def beyond(_: Bytes, new: Bytes) -> Bytes:
    """One change, past the end."""
    return np.concatenate([np.array([1, new.size], "<u4").view(np.uint8), new[:1]])


@pytest.mark.parametrize(("encode", "encoding"), [(short, "xor"), (short, "overwrite"), (beyond, "overwrite")])
def test_a_delta_that_does_not_fit_its_tensor_is_refused(
    encode: Any, encoding: str, base: Path, tmp_path: Path
) -> None:
    place = write_delta(tmp_path / "updates", 1, weights(0), weights(1), encode, delta_encoding=encoding)
    with pytest.raises(InvalidWeightsError, match="cannot be applied"):
        started(tmp_path, base)(place)


@pytest.mark.parametrize("weight_map", [{"a": "../x.safetensors"}, {"z": FILE}, {"a": "gone.safetensors"}])
def test_an_index_that_names_what_is_not_there_is_refused(
    weight_map: dict[str, str], base: Path, tmp_path: Path
) -> None:
    place = write_delta(tmp_path / "updates", 1, weights(0), weights(1))
    index = json.loads((place / INDEX_NAME).read_text()) | {"weight_map": weight_map}
    (place / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(InvalidWeightsError):
        started(tmp_path, base)(place)
