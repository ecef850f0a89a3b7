"""Which tensors a stock engine's parameter is made of, and the checksums that it has to have."""

import hashlib

import pytest
import torch

from refitd_client.transport.group.stock_checksum import on_gpu, on_host
from refitd_client.transport.group.stock_rules import UnexplainedError, explained, parts
from refitd_client.transport.group.stock_words import buckets, code_of, why_not_proved
from refitd_client.transport.ipc.offer import HostPlace, OfferedTensor

LAYER = "model.layers.0.self_attn"
ATTENTION = {f"{LAYER}.{part}_proj.weight": number for number, part in enumerate("qkv")}


def tensor(*shape: int, first: int = 0) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(first, first + count, dtype=torch.int32).reshape(shape)


def test_a_stacked_parameter_is_made_of_its_parts_in_their_order_and_any_other_of_the_tensor_of_its_name() -> None:
    found = explained([f"{LAYER}.qkv_proj.weight", "model.norm.weight"], ATTENTION | {"model.norm.weight": 9})
    assert found[f"{LAYER}.qkv_proj.weight"] == tuple(f"{LAYER}.{part}_proj.weight" for part in "qkv")
    assert found["model.norm.weight"] == ("model.norm.weight",)


@pytest.mark.parametrize(
    ("parameters", "tensors", "named"),
    [
        (["model.layers.0.mlp.experts.w13_weight"], {"model.layers.0.mlp.experts.0.up_proj.weight": 1}, "w13_weight"),
        ([f"{LAYER}.qkv_proj.bias"], ATTENTION, "qkv_proj.bias"),
        (["a"], {"a": 1, "b": 2}, "'b'"),
        (["model.embed_tokens.weight"], {"model.embed_tokens.weight": 1, "lm_head.weight": 2}, "lm_head"),
    ],
    ids=["experts", "a part that is missing", "a tensor of no parameter", "a head that is not tied"],
)
def test_what_is_made_in_an_unknown_way_is_refused_by_name(
    parameters: list[str], tensors: dict[str, int], named: str
) -> None:
    with pytest.raises(UnexplainedError, match=named):
        explained(parameters, tensors)


def test_a_head_that_is_tied_needs_no_parameter_of_its_own() -> None:
    both = {"model.embed_tokens.weight": 7, "lm_head.weight": 7, "model.layers.0.self_attn.rotary_emb.inv_freq": 1}
    assert explained(["model.embed_tokens.weight"], both) == {
        "model.embed_tokens.weight": ("model.embed_tokens.weight",)
    }


def test_one_rank_has_the_whole_and_several_have_rows_columns_or_the_same() -> None:
    there = {"a.weight": tensor(4, 6)}
    assert [len(each) for each in parts(["a.weight"], there, 0, 1)] == [1]
    second = [each[0].tolist() for each in parts(["a.weight"], there, 1, 2)]
    assert second == [there["a.weight"].tolist(), there["a.weight"][2:].tolist(), there["a.weight"][:, 3:].tolist()]


def test_ranks_share_keys_and_values_where_there_are_few() -> None:
    there = {name: tensor(8 if name.endswith("q_proj.weight") else 2, 1) for name in ATTENTION}
    last = list(parts([*ATTENTION], there, 3, 4))
    assert [[each.flatten().tolist() for each in some] for some in last[1:]] == [
        [[6, 7], [0, 1], [0, 1]],  # all ranks have all keys
        [[6, 7], [1], [1]],  # two ranks each
    ]


def test_the_rows_of_a_vocabulary_are_filled_up_with_zeros() -> None:
    whole, padded = parts(["model.embed_tokens.weight"], {"model.embed_tokens.weight": tensor(70, 2)}, 0, 1)
    assert (len(whole[0]), len(padded[0])) == (70, 128)
    assert padded[0][70:].count_nonzero() == 0


def test_the_checksum_of_a_tensor_in_host_memory_is_half_a_sha256_of_all_parts() -> None:
    first, second = tensor(3, 2), tensor(2, 2, first=9)
    whole = torch.cat([first, second]).numpy().tobytes()
    assert on_host([first, second]) == hashlib.sha256(whole).hexdigest()[:16]


def test_the_checksum_of_a_tensor_on_a_gpu_depends_on_each_byte_and_its_place() -> None:
    flat = torch.randint(0, 256, (3 * 2**17 + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = on_gpu([flat])
    assert before == on_gpu([flat[:1000], flat[1000:]])
    for at in (0, 70000, len(flat) - 1):
        flat[at] ^= 1
        assert on_gpu([flat]) != before
        flat[at] ^= 1
    assert on_gpu([flat.roll(4)]) != before
    assert on_gpu([flat[:0]]) == "0" * 16


@pytest.mark.parametrize(
    ("size", "checksum"),
    [(1, "3d93a6540b54ef2a"), (17, "aac9fd6b5deb13b5"), (32768, "a7c0b352e5389ec4"), (100003, "5bf609c975eecc8a")],
)
def test_the_checksum_of_a_tensor_on_a_gpu_is_that_of_sglangs_kernel(size: int, checksum: str) -> None:
    """What the kernel of SGLang 0.5.23 gives, run by triton's interpreter."""
    assert on_gpu([(torch.arange(size) * 7919 % 251).to(torch.uint8)]) == checksum


def offered(name: str, dtype: str, *shape: int) -> OfferedTensor:
    return OfferedTensor(name, dtype, shape, HostPlace("/somewhere", 0))


def test_each_tensor_of_a_bucket_begins_at_a_multiple_of_its_elements_and_all_are_sent_once() -> None:
    all_of = [offered("a", "U8", 3), offered("b", "BF16", 5), offered("c", "F32", 2), offered("d", "F64", 100)]
    found = list(buckets(all_of, 24))
    assert [[each.name for each in bucket] for bucket in found] == [["c", "b", "a"], ["d"]]
    assert list(buckets([], 24)) == []


def test_what_is_proved_is_each_parameter_of_each_rank_and_nothing_else() -> None:
    expected = [{"a": ["1", "2"], "b": ["3"]}, {"a": ["4"], "b": ["5"]}]
    assert why_not_proved([{"a": "4", "b": "5"}, {"a": "2", "b": "3"}], expected) is None
    assert "'b'" in (why_not_proved([{"a": "1", "b": "0"}, {"a": "4", "b": "5"}], expected) or "")
    assert "'b'" in (why_not_proved([{"a": "1"}, {"a": "4", "b": "5"}], expected) or "")
    assert why_not_proved([{"a": "1", "b": "3"}], expected) is not None
    assert why_not_proved([{"a": "1", "b": "3"}, {"a": "1", "b": "3"}], expected) is not None


def test_the_code_depends_on_secret_transfer_and_checksums() -> None:
    first = code_of("t", [{"a": ["1"]}], b"s")
    assert (
        len({first, code_of("u", [{"a": ["1"]}], b"s"), code_of("t", [{"a": ["2"]}], b"s"), code_of("t", [], b"k")})
        == 4
    )
    assert first == code_of("t", [{"a": ["1"]}], b"s")
