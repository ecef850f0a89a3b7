"""An output layer beside the embedding to which the engines' model ties it: redundant by bytes, and not by a flag."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor, inventory_of
from refitd_client.contract.naming import Order
from refitd_client.validation.examine import examine, structure
from refitd_client.validation.reference import read_reference
from refitd_client.validation.validate import Invalid, Options, Valid, Verdict, validate
from support.rawfiles import EMBED, HEAD, NORM, Spec, bf16, manifest_for, one_file, sharded

PATH = "run/v000001"
TIED: dict[str, Spec] = {EMBED: bf16(8, 4), NORM: bf16(4)}
COPY: dict[str, Spec] = {**TIED, HEAD: bf16(8, 4)}
ANOTHER: dict[str, Spec] = {**TIED, HEAD: bf16(8, 4, value=0x4000)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def base(folder: Path, tensors: Mapping[str, Spec], config: object = None) -> Reference:
    one_file(folder, tensors)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True} if config is None else config))
    return read_reference(folder)


def judged(root: Path, reference: Reference, options: Options | None = None, *, beside: bool = False) -> Verdict:
    expected = options or Options(run="run", order=Order(1, 1))
    return validate(examine(root, PATH, reference, expected, beside=beside), reference, expected)


def refused(verdict: Verdict) -> None:
    assert isinstance(verdict, Invalid), verdict
    assert verdict.code is Code.NO_COPY
    assert f"{HEAD} differs from {EMBED}" in verdict.reason
    assert "tie_word_embeddings" in verdict.reason
    assert len(verdict.reason) <= 240


@pytest.mark.parametrize("stored", [TIED, COPY, ANOTHER])
def test_a_head_that_differs_from_its_embedding_is_refused_whatever_the_model_stores(
    tmp_path: Path, root: Path, stored: Mapping[str, Spec]
) -> None:
    reference = base(tmp_path / "base", stored)
    one_file(root / PATH, ANOTHER)
    refused(judged(root, reference))
    refused(judged(root, reference, Options(allow_extra=True, allow_dtype_cast=True)))


def test_a_head_that_differs_in_its_last_byte_alone_is_refused(tmp_path: Path, root: Path) -> None:
    dtype, shape, data = bf16(8, 4)
    sharded(root / PATH, {EMBED: bf16(8, 4), NORM: bf16(4)}, {HEAD: (dtype, shape, data[:-1] + b"\x40")})
    refused(judged(root, base(tmp_path / "base", TIED)))


@pytest.mark.parametrize("stored", [TIED, COPY])
def test_a_head_that_is_a_copy_is_accepted_and_noted_as_one(
    tmp_path: Path, root: Path, stored: Mapping[str, Spec]
) -> None:
    sharded(root / PATH, {HEAD: bf16(8, 4)}, TIED)
    found = judged(root, base(tmp_path / "base", stored))
    assert isinstance(found, Valid), found
    assert found.notes == (f"{HEAD} is a copy of {EMBED}, to which the model ties it",)


def test_a_head_may_be_missing_only_where_the_models_own_is_a_copy(tmp_path: Path, root: Path) -> None:
    one_file(root / PATH, TIED)
    assert isinstance(judged(root, base(tmp_path / "copy", COPY)), Valid)
    found = judged(root, base(tmp_path / "another", ANOTHER))
    assert isinstance(found, Invalid)
    assert found.code is Code.MISSING_TENSOR


def test_a_model_that_is_not_tied_has_a_head_of_its_own(tmp_path: Path, root: Path) -> None:
    one_file(root / PATH, ANOTHER)
    assert isinstance(judged(root, base(tmp_path / "base", COPY, {"tie_word_embeddings": False})), Valid)


@pytest.mark.parametrize("tensors", [COPY, ANOTHER])
def test_where_gpus_prove_the_tensors_their_fingerprints_say_whether_a_head_is_a_copy(
    tmp_path: Path, root: Path, tensors: Mapping[str, Spec]
) -> None:
    folder = one_file(root / PATH, tensors)
    fingerprints = {EMBED: "a" * 16, NORM: "b" * 16, HEAD: ("a" if tensors is COPY else "c") * 16}
    manifest_for(folder, tensors, fingerprints=fingerprints)
    found = judged(root, base(tmp_path / "base", TIED), beside=True)
    if tensors is COPY:
        assert isinstance(found, Valid)
    else:
        refused(found)


def test_a_part_of_a_model_has_a_head_of_its_own(tmp_path: Path, root: Path) -> None:
    parts = {f"language_model.{name}": spec for name, spec in ANOTHER.items()}
    config = {"text_config": {"tie_word_embeddings": True}}
    one_file(root / PATH, parts)
    found = judged(
        root, base(tmp_path / "base", {f"language_model.{name}": spec for name, spec in TIED.items()}, config)
    )
    assert isinstance(found, Invalid)
    assert found.code is Code.NO_COPY


def test_a_look_without_the_bytes_does_not_judge_a_head(tmp_path: Path, root: Path) -> None:
    one_file(root / PATH, ANOTHER)
    seen = structure(root, PATH)
    reference = base(tmp_path / "base", TIED)
    assert reference.pairs_in(seen.inventory) == {HEAD: EMBED}
    assert (
        inventory_of(seen.headers).pairs
        == Inventory({HEAD: Tensor("BF16", (8, 4)), EMBED: Tensor("BF16", (8, 4))}).pairs
    )
