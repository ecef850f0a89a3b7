"""The careful loader: a checkpoint is loaded as a whole or not at all."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from refitd_embedded.model import Decoder
from refitd_embedded.weights import CarefulLoader, CheckpointError, WeightsLoaded, checksums, load
from support.embedded_kit import DOWN_PROJ, NORM, PROMPT, Tensors, checkpoint, random_tensors, write


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    """A model with the weights of seed 1."""
    return load(checkpoint(tmp_path / "start", 1))


def assert_refused(decoder: Decoder, directory: Path, named: str) -> None:
    """Refused with a text that names the culprit, and untouched."""
    before = checksums(decoder)
    with pytest.raises(CheckpointError, match=named):
        CarefulLoader(decoder).open(directory)
    assert checksums(decoder) == before


def assert_loaded(decoder: Decoder, directory: Path, wanted: Tensors) -> None:
    """Loaded, each tensor."""
    assert CarefulLoader(decoder).open(directory)() == WeightsLoaded()
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_and_shards_load_alike(decoder: Decoder, tmp_path: Path, shards: int) -> None:
    wanted = random_tensors(2)
    assert_loaded(decoder, write(tmp_path / "next", wanted, shards=shards), wanted)


def test_a_further_tensor_is_left_out(decoder: Decoder, tmp_path: Path) -> None:
    wanted = random_tensors(2)
    assert_loaded(decoder, write(tmp_path / "next", wanted | {"model.bogus.weight": torch.ones(3)}), wanted)


def test_other_precisions_are_converted(decoder: Decoder, tmp_path: Path) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in random_tensors(2).items()}
    assert_loaded(decoder, write(tmp_path / "next", halves), {name: tensor.float() for name, tensor in halves.items()})


def test_opening_alone_writes_nothing(decoder: Decoder, tmp_path: Path) -> None:
    before = checksums(decoder)
    CarefulLoader(decoder).open(checkpoint(tmp_path / "next", 2))
    assert checksums(decoder) == before


def test_files_outside_the_index_do_not_count(decoder: Decoder, tmp_path: Path) -> None:
    wanted = random_tensors(2)
    directory = write(tmp_path / "next", wanted, shards=2)
    safetensors.torch.save_file(random_tensors(3), directory / "stray.safetensors")
    assert_loaded(decoder, directory, wanted)


def test_a_missing_tensor_is_named(decoder: Decoder, tmp_path: Path) -> None:
    tensors = random_tensors(2)
    del tensors[DOWN_PROJ]
    assert_refused(decoder, write(tmp_path / "next", tensors), DOWN_PROJ)


@pytest.mark.parametrize(("name", "shape"), [(DOWN_PROJ, (32, 40)), (NORM, (16,))])
def test_another_shape_is_refused(decoder: Decoder, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    assert_refused(decoder, write(tmp_path / "next", random_tensors(2) | {name: torch.ones(shape)}), name)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(decoder: Decoder, tmp_path: Path, value: float) -> None:
    tensors = random_tensors(2)
    tensors[DOWN_PROJ][3, 4] = value
    assert_refused(decoder, write(tmp_path / "next", tensors), f"{DOWN_PROJ} has values that are not finite")


def test_values_too_large_for_the_model_are_refused(tmp_path: Path) -> None:
    decoder = load(checkpoint(tmp_path / "start", 1, dtype="float16"))
    tensors = random_tensors(2)
    tensors[DOWN_PROJ][3, 4] = 1e6
    assert_refused(decoder, write(tmp_path / "next", tensors), "not finite in torch.float16")


def test_integers_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    tensors = random_tensors(2) | {NORM: torch.ones(32, dtype=torch.int32)}
    assert_refused(decoder, write(tmp_path / "next", tensors), "torch.int32")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_torn_file_is_refused(decoder: Decoder, tmp_path: Path, shards: int) -> None:
    directory = write(tmp_path / "next", random_tensors(2), shards=shards)
    torn = max(directory.glob("*.safetensors"))
    os.truncate(torn, torn.stat().st_size // 2)
    assert_refused(decoder, directory, torn.name)


def test_garbage_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    (directory / "model.safetensors").write_bytes(bytes(range(250)) * 20)
    assert_refused(decoder, directory, "cannot be read")


def test_a_missing_shard_is_named(decoder: Decoder, tmp_path: Path) -> None:
    directory = write(tmp_path / "next", random_tensors(2), shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert_refused(decoder, directory, "model-00002-of-00002.safetensors")


def test_a_tensor_in_two_files_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    safetensors.torch.save_file({NORM: torch.ones(32)}, directory / "zzz.safetensors")
    assert_refused(decoder, directory, "zzz.safetensors")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(decoder: Decoder, tmp_path: Path, content: str) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    (directory / "model.safetensors.index.json").write_text(content)
    assert_refused(decoder, directory, "index.json")


def test_an_index_cannot_point_elsewhere(decoder: Decoder, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    foreign = {"weight_map": {NORM: "../start/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(foreign))
    assert_refused(decoder, directory, "outside its directory")


def test_no_files_and_no_directory_are_told_apart(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(decoder, tmp_path / "empty", "Cannot find any model weights")
    assert_refused(decoder, tmp_path / "nowhere", "is not a directory")


def test_tied_embeddings_have_no_head_of_their_own(tmp_path: Path) -> None:
    decoder = load(checkpoint(tmp_path / "start", 1, tie_word_embeddings=True))
    assert "lm_head.weight" not in decoder.state_dict()
    head = {"lm_head.weight": torch.zeros(97, 32)}
    wanted = random_tensors(2, tie_word_embeddings=True)
    assert_loaded(decoder, write(tmp_path / "next", wanted | head), wanted)
    assert decoder(torch.tensor([PROMPT])).abs().max() > 0


def test_checksums_follow_every_bit_and_nothing_else(decoder: Decoder) -> None:
    before = checksums(decoder)
    with torch.no_grad():
        decoder.model.layers[1].self_attn.v_proj.weight[0, 0] += 1
    changed = {name for name, digest in checksums(decoder).items() if digest != before[name]}
    assert changed == {"model.layers.1.self_attn.qkv_proj.weight"}


def test_checksums_are_those_of_a_real_server() -> None:
    """SGLang 0.5.23 on CPU hashes its fused parameters: sha256 of the parts one after the other, cut to 64 bits."""
    import hashlib

    from refitd_embedded.model import DecoderConfig

    config = {"model_type": "llama", "vocab_size": 3, "hidden_size": 4, "intermediate_size": 2}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    decoder = Decoder(DecoderConfig.from_hf(config))
    mlp = decoder.model.layers[0].mlp
    fused = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach().numpy().tobytes()
    found = checksums(decoder)
    assert found["model.layers.0.mlp.gate_up_proj.weight"] == hashlib.sha256(fused).hexdigest()[:16]
    assert "model.layers.0.mlp.up_proj.weight" not in found
