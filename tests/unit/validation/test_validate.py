"""The verdict: valid, invalid with a code and a reason, or unknown. Evidence is made by hand: no file is read."""

from dataclasses import replace
from typing import Any

import pytest

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.finite import NonFinite
from refitd_client.checkpoint.header import Header, TensorSpec
from refitd_client.checkpoint.index import CheckpointLayout
from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor, inventory_of
from refitd_client.checkpoint.opening import FileStat
from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary, digest_of_files
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind
from refitd_client.validation.contents import Contents
from refitd_client.validation.examine import check_manifest
from refitd_client.validation.lora import AdapterConfig
from refitd_client.validation.validate import (
    Evidence,
    Invalid,
    Options,
    Structure,
    Unknown,
    Valid,
    Verdict,
    judge,
    validate,
)

FILE, NORM, HEAD = "model.safetensors", "model.norm.weight", "lm_head.weight"
HEADER = Header({NORM: TensorSpec("BF16", (4,), 0, 8), HEAD: TensorSpec("BF16", (2, 4), 8, 24)}, 100, {})
REGULAR, FIFO = 0o100000, 0o010000
STRUCTURE = Structure(
    path="run/v000001",
    signature="s",
    files={FILE: FileStat(124, 1, 1, REGULAR), "notes.txt": FileStat(6, 1, 2, REGULAR)},
    headers={FILE: HEADER},
    inventory=inventory_of({FILE: HEADER}),
)
CONTENTS = Contents({FILE: "xxh3:aa"}, ())
REFERENCE = Reference(Inventory({NORM: Tensor("BF16", (4,)), HEAD: Tensor("BF16", (2, 4))}), tied=False, source="/base")
MANIFEST = Manifest(
    run="run",
    generation=1,
    step=1,
    files={FILE: ManifestFile(size=124, digest="xxh3:aa")},
    tensors=TensorsSummary(count=2, bytes=24, dtypes={"BF16": 2}),
    created_at="",
)
EXPECTED = Options(run="run", order=Order(1, 1))


def verdict(options: Options = EXPECTED, contents: Contents | None = CONTENTS, **changes: Any) -> Verdict:
    return validate(Evidence(structure=replace(STRUCTURE, **changes), contents=contents), REFERENCE, options)


def with_manifest(**changes: Any) -> dict[str, Any]:
    return {"manifest": replace(MANIFEST, **changes), "has_manifest": True}


def test_a_checkpoint_in_good_order_is_valid() -> None:
    found = verdict()
    assert isinstance(found, Valid)
    assert found.bytes == 130
    assert found.digest == digest_of_files({FILE: (124, "xxh3:aa")})
    assert found.inventory == STRUCTURE.inventory.digest
    assert found.notes == ()


def test_what_could_not_be_read_is_unknown_and_never_invalid() -> None:
    assert validate(Evidence(failure="x cannot be read: EIO"), REFERENCE, EXPECTED) == Unknown(
        "x cannot be read: EIO", Code.UNREADABLE
    )
    assert isinstance(validate(Evidence(structure=STRUCTURE), REFERENCE, EXPECTED), Unknown)


def test_what_changed_meanwhile_is_unknown_whatever_else_is_wrong_with_it() -> None:
    faults = (Defect(Code.TORN_FILE, "torn"), Defect(Code.CHANGED, "changed"))
    assert verdict(faults=faults) == Unknown("changed", Code.CHANGED)


def test_the_first_fault_of_the_structure_is_the_reason() -> None:
    faults = (Defect(Code.TORN_FILE, "torn"), Defect(Code.BAD_HEADER, "bad"))
    assert verdict(faults=faults) == Invalid(Code.TORN_FILE, "torn")


def test_without_a_model_to_hold_it_against_the_setting_is_named() -> None:
    found = judge(STRUCTURE, None, EXPECTED)
    assert isinstance(found, Invalid)
    assert found.code is Code.NO_REFERENCE
    assert "--base-model (REFITD_BASE_MODEL)" in found.reason


def test_a_version_under_other_names_is_not_told_to_leave_the_engines_on_their_old_values() -> None:
    tensors = {f"policy.{name}": tensor for name, tensor in STRUCTURE.inventory.tensors.items()}
    found = verdict(inventory=Inventory(tensors))
    assert isinstance(found, Invalid)
    assert found.code is Code.MISSING_TENSOR
    assert f"{len(tensors)} tensors that it has are none of the model's, the first of them policy." in found.reason
    assert "rename=" in found.reason
    assert "allow_missing" not in found.reason


UP, SCALES = "mlp.up_proj.weight", "mlp.up_proj.weight_scale_inv"
PLAIN = Inventory({NORM: Tensor("BF16", (4,)), UP: Tensor("BF16", (256, 128), FILE)})
FP8 = Inventory(
    {NORM: Tensor("BF16", (4,)), UP: Tensor("F8_E4M3", (256, 128), FILE), SCALES: Tensor("F32", (2, 1), FILE)}
)


@pytest.mark.parametrize(
    "options", [EXPECTED, Options(allow_missing=("*.*",), allow_extra=True, allow_dtype_cast=True)]
)
@pytest.mark.parametrize(
    ("checkpoint", "served", "advice"),
    [
        (PLAIN, FP8, "publish with dtype='fp8_block' and the engines' model as base_model"),
        (FP8, PLAIN, "publish without dtype='fp8_block'"),
    ],
    ids=["bf16 for fp8", "fp8 for bf16"],
)
def test_weights_that_are_in_fp8_blocks_on_one_side_alone_are_wrong_and_the_dtype_to_publish_is_named(
    checkpoint: Inventory, served: Inventory, advice: str, options: Options
) -> None:
    """Whatever else may differ: engines would cast them without their scales."""
    found = judge(replace(STRUCTURE, inventory=checkpoint), Reference(served, tied=False, source="/base"), options)
    assert isinstance(found, Invalid)
    assert (found.code, found.reason.startswith(f"tensor {UP} in {FILE} is ")) == (Code.WRONG_DTYPE, True)
    assert (SCALES in found.reason, advice in found.reason) == (False, True)


def test_a_checkpoint_in_fp8_blocks_is_valid_for_a_model_in_fp8_blocks_and_a_part_of_it_where_parts_are_allowed() -> (
    None
):
    reference = Reference(FP8, tied=False, source="/base")
    assert judge(replace(STRUCTURE, inventory=FP8), reference, EXPECTED) is None
    norm = replace(STRUCTURE, inventory=Inventory({NORM: Tensor("BF16", (4,))}))
    assert judge(norm, reference, Options(allow_missing=("*.*",))) is None


def test_what_was_allowed_to_differ_is_noted() -> None:
    inventory = Inventory({NORM: Tensor("F32", (4,)), "bogus": Tensor("U8", (1,))})
    found = verdict(Options(allow_missing=("*.*",), allow_extra=True, allow_dtype_cast=True), inventory=inventory)
    assert isinstance(found, Valid)
    assert found.left_out == (HEAD,)
    assert all(name in found.notes[0] for name in (NORM, "bogus"))


def test_values_that_are_not_finite_are_invalid() -> None:
    found = verdict(contents=Contents({FILE: "xxh3:aa"}, (NonFinite(FILE, NORM, 3, 2),)))
    assert isinstance(found, Invalid)
    assert found.code is Code.NON_FINITE
    assert (
        f"tensor {NORM} in {FILE} has 2 non-finite values (NaN or infinity), the first at flat index 3" in found.reason
    )


def test_a_flipped_byte_does_not_match_the_manifest() -> None:
    found = verdict(contents=Contents({FILE: "xxh3:bb"}, ()), **with_manifest())
    assert isinstance(found, Invalid)
    assert found.code is Code.MANIFEST_MISMATCH
    assert FILE in found.reason


@pytest.mark.parametrize("change", [{"run": "other"}, {"step": 2}, {"generation": 2}])
def test_a_manifest_of_another_version_is_refused(change: dict[str, Any]) -> None:
    found = verdict(**with_manifest(**change))
    assert isinstance(found, Invalid)
    assert found.code is Code.MANIFEST_MISMATCH
    assert next(iter(change)) in found.reason


def test_a_kind_that_cannot_be_validated_says_so() -> None:
    found = verdict(**with_manifest(kind=Kind.DELTA), faults=(Defect(Code.NO_WEIGHTS, "none"),))
    assert isinstance(found, Invalid)
    assert found.code is Code.UNSUPPORTED_KIND


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.DELTA])
def test_engines_that_get_adapters_get_nothing_else(kind: Kind) -> None:
    found = verdict(replace(EXPECTED, takes=Kind.LORA), **with_manifest(kind=kind))
    assert isinstance(found, Invalid)
    assert found.code is Code.UNSUPPORTED_KIND
    assert "publish adapters" in found.reason


@pytest.mark.parametrize("noticed", [None, Kind.LORA])
def test_a_folder_that_is_no_good_adapter_is_refused_by_what_is_wrong_with_it(noticed: Kind | None) -> None:
    options = replace(EXPECTED, takes=Kind.LORA, kind=noticed)
    found = verdict(options, faults=(Defect(Code.UNSUPPORTED_KIND, "it says use_dora"),))
    assert found == Invalid(Code.UNSUPPORTED_KIND, "it says use_dora")
    found = verdict(options)
    assert isinstance(found, Invalid)
    assert "no LoRA adapter" in found.reason


def test_engines_that_get_full_versions_get_no_adapter() -> None:
    adapter = AdapterConfig(peft_type="LORA", r=4)
    found = verdict(replace(EXPECTED, kind=Kind.FULL), adapter=adapter)
    assert isinstance(found, Invalid)
    assert "--lora NAME" in found.reason


LISTING = {FILE: FileStat(124, 1, 1, REGULAR), "refit.json": FileStat(9, 1, 3, REGULAR)}


def claims(listing: dict[str, FileStat], **changes: Any) -> list[tuple[Code, str]]:
    faults = check_manifest(replace(MANIFEST, **changes), listing, CheckpointLayout({FILE: HEADER}, None))
    return [(fault.code, fault.reason) for fault in faults]


def test_a_folder_that_is_as_its_manifest_says_has_no_fault() -> None:
    assert claims(LISTING | {"notes.txt": FileStat(1, 1, 9, REGULAR)}) == []


@pytest.mark.parametrize(
    ("listing", "changes", "code", "says"),
    [
        ({}, {}, Code.MISSING_FILE, FILE),
        ({FILE: FileStat(123, 1, 1, REGULAR)}, {}, Code.MANIFEST_MISMATCH, "123"),
        ({FILE: FileStat(124, 1, 1, FIFO)}, {}, Code.NOT_REGULAR, "FIFO"),
        (LISTING | {"x.safetensors": FileStat(1, 1, 9, REGULAR)}, {}, Code.MANIFEST_MISMATCH, "x.safetensors"),
        (LISTING, {"tensors": replace(MANIFEST.tensors, count=3)}, Code.MANIFEST_MISMATCH, "3 tensors"),
        (LISTING, {"tensors": replace(MANIFEST.tensors, bytes=3)}, Code.MANIFEST_MISMATCH, "3 bytes"),
        (LISTING, {"tensors": replace(MANIFEST.tensors, dtypes={"F32": 2})}, Code.MANIFEST_MISMATCH, "2 F32"),
    ],
)
def test_a_manifest_that_disagrees_with_the_folder_is_told(
    listing: dict[str, FileStat], changes: dict[str, Any], code: Code, says: str
) -> None:
    ((found, reason),) = claims(listing, **changes)
    assert found is code
    assert says in reason
