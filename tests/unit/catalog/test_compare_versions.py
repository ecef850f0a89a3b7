"""What differs between two versions, as far as headers, fingerprints and a delta's list tell."""

from typing import Any

import pytest

from refitd.catalog.compare import Side, ValuesRead, compared
from refitd_client.checkpoint.inventory import Inventory, Tensor
from refitd_client.contract.manifest import Manifest, TensorsSummary
from refitd_client.validation.validate import Structure
from support.records import version

NONE: dict[str, str] = {}


def side(step: int, tensors: dict[str, tuple[int, ...]], fingerprints: dict[str, str] = NONE, **fields: Any) -> Side:
    manifest = Manifest(
        run="run",
        generation=1,
        step=step,
        files={},
        tensors=TensorsSummary(count=0, bytes=0, dtypes={}),
        created_at="",
        fingerprints=fingerprints,
    )
    seen = Structure(path="", files={}, headers={}, inventory=Inventory({}), manifest=manifest)
    known = {name: Tensor(fields.get("dtype", "BF16"), shape, "f") for name, shape in tensors.items()}
    return Side(version(step, bytes=step * 100), seen, known)


MODEL = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.mlp.experts.3.w": (4, 4),
    "model.layers.0.norm.weight": (4,),
    "model.layers.10.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}


def test_tensors_belong_to_their_layer_or_to_the_module_that_has_them() -> None:
    found = compared(side(1, MODEL), side(2, MODEL), None)
    assert [(layer.layer, layer.tensors, layer.elements) for layer in found.layers] == [
        ("model.embed_tokens", 1, 32),
        ("model.layers.0", 2, 20),
        ("model.layers.10", 1, 4),
        ("lm_head", 1, 32),
    ]
    assert (found.bytes, found.density, found.changed_tensors) == ((100, 200), None, None)


def test_what_is_only_in_one_of_them_or_has_another_shape_is_named() -> None:
    found = compared(side(1, {"a.w": (2, 3), "b.w": (1,)}), side(2, {"a.w": (3, 3), "c.w": (1,)}), None)
    assert (found.removed, found.added) == (["b.w"], ["c.w"])
    assert found.reshaped == ["a.w: BF16 [2, 3] became BF16 [3, 3]"]
    assert found.layers == []


def test_fingerprints_say_which_tensors_differ() -> None:
    before = dict.fromkeys(MODEL, "0" * 16)
    found = compared(side(1, MODEL, before), side(2, MODEL, before | {"lm_head.weight": "1" * 16}), None)
    assert [layer.changed_tensors for layer in found.layers] == [0, 0, 0, 1]
    assert (found.changed_tensors, found.notes) == (1, [])


def test_a_deltas_list_gives_the_density_of_each_layer() -> None:
    found = compared(side(1, MODEL), side(2, MODEL), {"lm_head.weight": 8, "model.layers.0.norm.weight": 1})
    assert [layer.changed for layer in found.layers] == [0, 1, 0, 8]
    assert (found.density, found.changed_tensors, found.notes) == (9 / 88, 2, [])


def test_norms_are_those_of_all_tensors_of_a_layer_and_what_is_not_finite_has_none() -> None:
    values = {
        "model.layers.0.norm.weight": ValuesRead(9.0, 1.0, 2),
        "model.layers.0.mlp.experts.3.w": ValuesRead(16.0, 0.0, 0),
        "lm_head.weight": ValuesRead(float("nan"), 0.0, 0),
    }
    found = compared(side(1, MODEL), side(2, MODEL), None, values)
    assert (found.density, found.changed_tensors) == (None, None), "not all tensors were read"
    assert (found.layers[1].norm, found.layers[1].distance) == (5.0, 1.0)
    assert (found.layers[3].norm, found.norm, found.distance) == (None, None, 1.0)


def test_values_that_were_read_of_full_versions_give_the_density_of_each_layer() -> None:
    values = dict.fromkeys(MODEL, ValuesRead(1.0, 0.0, 0)) | {"lm_head.weight": ValuesRead(1.0, 1.0, 8)}
    found = compared(side(1, MODEL), side(2, MODEL), None, values)
    assert [(layer.changed, layer.changed_tensors) for layer in found.layers] == [(0, 0), (0, 0), (0, 0), (8, 1)]
    assert (found.density, found.changed_tensors, found.notes) == (8 / 88, 1, [])


def test_tensors_whose_values_are_not_read_are_said_to_be_left_out() -> None:
    quantised = side(1, {"a.w": (2,)}, dtype="F8_E4M3")
    assert "F8_E4M3" in compared(quantised, quantised, None, {}).notes[-1]


@pytest.mark.parametrize("count", [1500])
def test_a_model_with_very_many_layers_is_listed_in_part(count: int) -> None:
    many = {f"layers.{number}.w": (1,) for number in range(count)}
    found = compared(side(1, many), side(2, many), None)
    assert len(found.layers) == 1000
    assert any("1500 layers" in note for note in found.notes)
