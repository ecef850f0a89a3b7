"""The careful loader: a checkpoint is loaded as a whole or not at all."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from refitd_embedded.model import Decoder
from refitd_embedded.weights import CarefulLoader, CheckpointError, checksums, load
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
    assert CarefulLoader(decoder).open(directory)() is None
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.parametrize("shards", [1, 3])
def test_one_file_and_shards_load_alike(decoder: Decoder, tmp_path: Path, shards: int) -> None:
    wanted = random_tensors(2)
    assert_loaded(decoder, write(tmp_path / "next", wanted, shards=shards), wanted)


def test_values_too_large_for_the_model_are_refused(tmp_path: Path) -> None:
    decoder = load(checkpoint(tmp_path / "start", 1, dtype="float16"))
    tensors = random_tensors(2)
    tensors[DOWN_PROJ][3, 4] = 1e6
    assert_refused(decoder, write(tmp_path / "next", tensors), "not finite in torch.float16")


def test_a_tensor_in_two_files_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    safetensors.torch.save_file({NORM: torch.ones(32)}, directory / "zzz.safetensors")
    assert_refused(decoder, directory, "zzz.safetensors")


def test_an_index_cannot_point_elsewhere(decoder: Decoder, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "next", 2)
    foreign = {"weight_map": {NORM: "../start/model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(foreign))
    assert_refused(decoder, directory, "outside its directory")


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
