"""What a checkpoint may differ in from the model, and how a difference reads."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from refitd_client.checkpoint.inventory import Difference, Inventory, Reference, Tensor, compare, listed

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
MODEL = {EMBED: Tensor("BF16", (8, 4)), NORM: Tensor("BF16", (4,)), HEAD: Tensor("BF16", (8, 4))}
TIED = {name: tensor for name, tensor in MODEL.items() if name != HEAD}


def served(tensors: dict[str, Tensor], *, tied: bool = False, copies: Iterable[str] = ()) -> Reference:
    return Reference(Inventory(tensors), tied, "/base", copies=frozenset(copies))


def differ(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    tied: bool = False,
    copies: Iterable[str] = (),
    **allowed: Any,
) -> list[tuple[Difference, str]]:
    differences = compare(Inventory(found), served(expected, tied=tied, copies=copies), **allowed)
    return [(each.kind, each.name) for each in differences]


def test_the_same_tensors_do_not_differ_wherever_they_lie() -> None:
    moved = {name: Tensor(tensor.dtype, tensor.shape, "other") for name, tensor in reversed(MODEL.items())}
    assert differ(moved, MODEL) == []
    assert Inventory(moved).digest == Inventory(MODEL).digest


@pytest.mark.parametrize("other", [Tensor("F16", (4,)), Tensor("BF16", (2, 2)), Tensor("BF16", ())])
def test_the_digest_tells_dtypes_and_shapes_apart(other: Tensor) -> None:
    assert Inventory(MODEL | {NORM: other}).digest != Inventory(MODEL).digest


def test_half_a_checkpoint_differs() -> None:
    assert differ({HEAD: MODEL[HEAD]}, MODEL) == [(Difference.MISSING, EMBED), (Difference.MISSING, NORM)]
    assert differ({HEAD: MODEL[HEAD]}, MODEL, allow_missing=["model.*"]) == []


def test_what_may_be_missing_is_named_and_all_else_may_not() -> None:
    lost = {EMBED: MODEL[EMBED]}
    assert differ(lost, MODEL, allow_missing=["lm_head.*", "mtp.*"]) == [(Difference.MISSING, NORM)]
    assert differ(lost, MODEL, allow_missing=["lm_head.*", NORM]) == []


def test_an_extra_tensor_differs() -> None:
    bogus = MODEL | {"bogus": Tensor("BF16", (1,))}
    assert differ(bogus, MODEL) == [(Difference.EXTRA, "bogus")]
    assert differ(bogus, MODEL, allow_extra=True) == []


def test_a_shape_is_never_allowed_to_differ() -> None:
    wrong = MODEL | {NORM: Tensor("BF16", (2, 2))}
    everything: dict[str, Any] = {"allow_missing": ["*.*"], "allow_extra": True, "allow_dtype_cast": True, "tied": True}
    assert differ(wrong, MODEL, **everything) == [(Difference.SHAPE, NORM)]


def test_a_dtype_may_differ_only_when_allowed_and_only_among_floats() -> None:
    assert differ(MODEL | {NORM: Tensor("F32", (4,))}, MODEL) == [(Difference.DTYPE, NORM)]
    for dtype in ("F64", "F32", "F16"):
        assert differ(MODEL | {NORM: Tensor(dtype, (4,))}, MODEL, allow_dtype_cast=True) == []
    for dtype in ("F8_E4M3", "I16", "U8"):
        found = differ(MODEL | {NORM: Tensor(dtype, (4,))}, MODEL, allow_dtype_cast=True)
        assert found == [(Difference.DTYPE, NORM)]


def test_a_head_may_be_there_if_the_model_is_tied_and_missing_if_the_models_own_is_a_copy() -> None:
    for expected in (MODEL, TIED):
        assert differ(MODEL, expected, tied=True) == []
    assert differ(TIED, MODEL, tied=True, copies=[HEAD]) == []
    assert differ(TIED, MODEL, tied=True) == [(Difference.MISSING, HEAD)]
    assert differ(TIED, MODEL, copies=[HEAD]) == [(Difference.MISSING, HEAD)]
    assert differ(MODEL, TIED) == [(Difference.EXTRA, HEAD)]


@pytest.mark.parametrize(
    ("head", "embedding", "others"),
    [
        (HEAD, EMBED, ["model.layers.61.embed_tokens.weight", "mtp.embed_tokens.weight"]),
        ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight", ["talker.embed_tokens.weight"]),
        ("embed_out.weight", "gpt_neox.embed_in.weight", []),
        (HEAD, "transformer.wte.weight", ["transformer.wpe.weight"]),
    ],
)
def test_a_head_belongs_to_the_embedding_of_its_own_part_of_the_model(
    head: str, embedding: str, others: list[str]
) -> None:
    tensors = dict.fromkeys([*others, head, embedding], Tensor("BF16", (8, 4)))
    assert Inventory(tensors).pairs == {head: embedding}


def test_a_tensor_that_the_models_own_index_names_and_no_file_has_may_be_there() -> None:
    reference = replace(served(TIED), unstored=frozenset({HEAD}))
    assert compare(Inventory(MODEL), reference) == []


def test_a_tied_head_of_another_shape_than_the_embedding_differs() -> None:
    wrong = MODEL | {HEAD: Tensor("BF16", (9, 4))}
    assert differ(wrong, TIED, tied=True) == [(Difference.SHAPE, HEAD)]
    assert differ(wrong, MODEL, tied=True) == [(Difference.SHAPE, HEAD)]


def test_a_table_that_loaders_compute_themselves_does_not_matter() -> None:
    old = MODEL | {"model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("F32", (2,))}
    assert differ(old, MODEL) == []
    assert differ(MODEL, old) == []


def test_a_difference_names_the_tensor_both_values_and_the_file() -> None:
    found = MODEL | {NORM: Tensor("BF16", (5,), "model-2.safetensors")}
    assert listed(compare(Inventory(found), served(MODEL))) == (
        f"tensor {NORM} in model-2.safetensors is BF16 [5] where the model has BF16 [4]"
    )


def test_many_differences_are_counted_and_not_all_listed() -> None:
    many = {f"t{number:02d}": Tensor("U8", ()) for number in range(15)}
    text = listed(compare(Inventory({}), served(many)))
    assert text.startswith("tensor t00 (U8 []) is missing; ")
    assert text.endswith("; and 12 more")
    assert "t03" not in text
