"""Which files a loader would read, and an index that disagrees with the shards."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.index import (
    Index,
    IndexRefusedError,
    check_index,
    lay_out,
    parse_index,
    read_elsewhere,
    two_saves,
)
from refitd_client.contract.naming import INDEX_NAME

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = Index({"a": ONE, "b": TWO})


def index_of(weight_map: object) -> Index:
    return parse_index(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode())


def codes(names: set[str], index: Index | None = None) -> list[Code]:
    return [fault.code for fault in lay_out(names, index).faults]


def test_without_an_index_every_safetensors_file_counts() -> None:
    layout = lay_out({"b.safetensors", "a.safetensors", "config.json"}, None)
    assert layout.weights == ("a.safetensors", "b.safetensors")
    assert layout.faults == ()


def test_with_an_index_only_its_files_count() -> None:
    assert lay_out({ONE, TWO, "stray.safetensors"}, INDEX).weights == (ONE, TWO)


def test_a_missing_shard_is_named() -> None:
    layout = lay_out({ONE}, INDEX)
    assert layout.weights == (ONE,)
    (fault,) = layout.faults
    assert fault.code is Code.MISSING_FILE
    assert TWO in fault.reason


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_pickle_alone_is_refused_by_name(name: str) -> None:
    (fault,) = lay_out({name, "config.json"}, None).faults
    assert fault.code is Code.PICKLE
    assert name in fault.reason


def test_pickles_beside_safetensors_are_not_looked_at() -> None:
    assert codes({"model.safetensors", "pytorch_model.bin"}) == []


def test_what_a_trainer_leaves_is_no_checkpoint_of_pickles() -> None:
    assert codes({"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"}) == [Code.NO_WEIGHTS]


def test_an_empty_folder_has_no_weights() -> None:
    assert codes(set()) == [Code.NO_WEIGHTS]
    assert codes({"config.json"}, Index({})) == [Code.NO_WEIGHTS]


def test_mistrals_second_copy_is_left_out_as_loaders_do() -> None:
    assert lay_out({"consolidated.safetensors", "model.safetensors"}, None).weights == ("model.safetensors",)
    three = {"consolidated.safetensors", "model.safetensors", "x.safetensors"}
    assert len(lay_out(three, None).weights) == 3


SHARDS = {ONE: 1, TWO: 2, INDEX_NAME: 3}
SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("times", "index", "says"),
    [
        (SHARDS | {SINGLE: 9}, INDEX, f"{INDEX_NAME} (1970-01-01 00:00:03 UTC) and {SINGLE} (1970-01-01 00:00:09 UTC)"),
        (
            SHARDS | {SINGLE: 0},
            INDEX,
            f"{SINGLE} (1970-01-01 00:00:00 UTC)",
        ),  # as after a copy: its time proves nothing
        (SHARDS | {"model-00001-of-00001.safetensors": 0}, INDEX, "model-*-of-00001.safetensors"),
        (SHARDS | {"model-00001-of-00003.safetensors": 4}, INDEX, "model-*-of-00003.safetensors"),
        ({INDEX_NAME: 3, SINGLE: 4}, INDEX, f"is of an earlier save than {SINGLE}"),
        ({INDEX_NAME: 3, SINGLE: 2}, INDEX, f"is of another save than {SINGLE}"),
        ({INDEX_NAME: 3, PICKLE: 4}, INDEX, f"is of an earlier save than {PICKLE}"),
        ({SINGLE: 1, ONE: 2, TWO: 3}, None, "the two mixed"),
        ({ONE: 2, TWO: 3} | {f"model-{number:05d}-of-00003.safetensors": 1 for number in (1, 2, 3)}, None, "two mixed"),
        ({SINGLE: 1, PICKLE: 2}, None, f"{SINGLE} (1970-01-01 00:00:01 UTC) and {PICKLE}"),
        (SHARDS | {PICKLE: 4}, INDEX, f"and {PICKLE} (1970-01-01 00:00:04 UTC)"),
    ],
)
def test_a_folder_that_was_saved_to_twice_is_refused_by_both_names_and_times(
    times: dict[str, int], index: Index | None, says: str
) -> None:
    fault = two_saves({name: time * 10**9 for name, time in times.items()}, index)
    assert fault is not None
    assert fault.code is Code.TWO_SAVES
    assert says in fault.reason
    assert len(fault.reason) <= 240


@pytest.mark.parametrize(
    ("times", "index"),
    [
        (SHARDS, INDEX),
        ({SINGLE: 1}, None),
        (SHARDS | {"model-00001-of-00003.safetensors": 2}, INDEX),  # what is left of an earlier save, and no save
        (SHARDS | {"value_head.safetensors": 9, "adapter_model.safetensors": 9, "old.safetensors": 9}, INDEX),
        (SHARDS | {"optimizer.bin": 9, "training_args.bin": 9, "pytorch_model_fsdp.bin": 9}, INDEX),
        ({SINGLE: 2, PICKLE: 1}, None),  # both forms of one save, as on hubs
        ({ONE: 1, TWO: 1, SINGLE: 1}, Index({"a": ONE, "b": TWO, "c": SINGLE})),
        ({INDEX_NAME: 1}, INDEX),  # its shards are still being written
        ({PICKLE: 1}, None),
    ],
)
def test_what_lies_beside_one_save_is_no_second_one(times: dict[str, int], index: Index | None) -> None:
    assert two_saves(times, index) is None


def test_a_file_that_vllm_reads_in_place_of_the_one_that_was_checked_is_refused() -> None:
    names = {"consolidated.safetensors", SINGLE}
    (fault,) = read_elsewhere(names, lay_out(names, None))
    assert fault.code is Code.TWO_SAVES
    assert "consolidated.safetensors" in fault.reason
    assert not list(read_elsewhere({"consolidated.safetensors"}, lay_out({"consolidated.safetensors"}, None)))
    assert not list(read_elsewhere(SHARDS, lay_out(SHARDS, INDEX)))


def test_a_name_that_cannot_be_printed_is_refused() -> None:
    (fault,) = lay_out({"\udcff.safetensors"}, None).faults
    assert fault.reason.isprintable()


def test_an_index_that_agrees_has_no_fault() -> None:
    assert not list(check_index(INDEX, {ONE: ["a"], TWO: ["b"]}))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({ONE: ["a"], TWO: []}, ["'b' is not in"]),
        ({ONE: ["a"], TWO: ["b", "c"]}, ["'c' is in"]),
        ({ONE: ["a", "b"], TWO: ["b"]}, ["'b' is in model-00001"]),
        ({ONE: ["b"], TWO: ["a"]}, ["'a' is not in", "'b' is not in", "'b' is in", "'a' is in"]),
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_told_apart(tensors: dict[str, list[str]], says: list[str]) -> None:
    faults = list(check_index(INDEX, tensors))
    assert {fault.code for fault in faults} == {Code.INDEX_MISMATCH}
    assert [part for fault, part in zip(faults, says, strict=True) if part in fault.reason] == says


def test_a_shard_that_could_not_be_read_is_not_blamed_twice() -> None:
    assert not list(check_index(INDEX, {ONE: ["a"]}))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/x.safetensors", "s/x.safetensors", "x.bin", ".x.safetensors", ""]
)
def test_an_index_may_only_name_plain_safetensors_files(file: str) -> None:
    with pytest.raises(IndexRefusedError, match="names a file"):
        index_of({"a": file})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map":[]}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        b'{"weight_map":' * 10_000,
        b'{"metadata":' + b"[" * 100_000,
        b'{"metadata":"\xff","weight_map":{"\xff":"x.safetensors"}}',
        b'{"weight_map":{"a":"x.safetensors"}',
    ],
)
def test_a_broken_index_is_refused(data: bytes) -> None:
    with pytest.raises(IndexRefusedError):
        parse_index(data)


@given(st.binary(max_size=40) | st.builds(lambda value: b'{"weight_map":%b}' % value, st.binary(max_size=40)))
def test_any_bytes_give_an_index_or_a_refusal(data: bytes) -> None:
    with suppress(IndexRefusedError):
        assert parse_index(data).files is not None


@given(st.dictionaries(st.text(max_size=5), st.sampled_from([ONE, TWO])))
def test_an_index_is_read_as_it_was_written(weight_map: dict[str, str]) -> None:
    assert index_of(weight_map).file_of == weight_map
