"""Handles of GPU memory, as pickles that are read and never loaded."""

import base64
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from refitd_front.handles import HandlesRefusedError, read_handles

COUNTER = b"/torch_4711_3_0"


ALLOCATION = bytes(range(64))


def arguments(*shape: int, dtype: torch.dtype = torch.bfloat16, **other: Any) -> tuple[Any, ...]:
    """What torch's `reduce_tensor` gives for a tensor on a GPU, beside the function (torch 2.13)."""
    tensor = torch.zeros(shape, dtype=dtype)
    given = {
        "kind": type(tensor), "size": tensor.size(), "stride": tensor.stride(), "offset": 0,
        "storage": type(tensor._typed_storage()), "dtype": dtype, "device": 0, "handle": b"\x02c" + ALLOCATION,
        "storage_bytes": 4096, "storage_offset": 512, "requires_grad": False, "counter": COUNTER, "place": 8,
        "event": b"e" * 64, "waits": True,
    }  # fmt: skip
    return tuple((given | other).values())


def sent(found: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> str:
    return base64.b64encode(pickle.dumps(found, protocol=protocol)).decode()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_handles_of_each_tensor_and_of_a_buffer_are_read_as_they_were_sent(protocol: int) -> None:
    kinds = [arguments(2, 3, offset=4), arguments(dtype=torch.float32, waits=False), arguments(7, kind=Parameter)]
    listed = read_handles(sent([{"a": each, "GPU-b": each} for each in kinds], protocol), None)
    assert [each["GPU-b"] for each in listed.by_gpu] == [each["GPU-a"] for each in listed.by_gpu]
    first, scalar, parameter = (each["GPU-a"] for each in listed.by_gpu)
    assert (first.dtype, first.shape, first.handle, first.offset) == ("BF16", (2, 3), ALLOCATION, 512 + 4 * 2)
    assert (first.counter, first.event) == ((COUNTER.decode(), 8), b"e" * 64)
    assert (scalar.dtype, scalar.shape, scalar.offset, scalar.event) == ("F32", (), 512, b"")
    listed.check([("x", "BF16", (2, 3)), ("y", "F32", ()), ("z", parameter.dtype, (7,))])
    packed = read_handles(sent({"a": arguments(100, dtype=torch.uint8)}, protocol), [60, 40])
    packed.check([("x", "BF16", (30,)), ("y", "U8", (40,))])
    assert [each["GPU-a"].shape for each in packed.by_gpu] == [(100,)]


@pytest.mark.parametrize("handle", [ALLOCATION, b"c" + ALLOCATION, b"\x01c" + ALLOCATION])
def test_a_handle_is_read_as_each_torch_has_written_it(handle: bytes) -> None:
    assert read_handles(sent([{"a": arguments(1, handle=handle)}]), None).by_gpu[0]["GPU-a"].handle == ALLOCATION


def test_a_tensor_without_bytes_has_no_handle() -> None:
    nothing = arguments(0, 3, handle=None, storage_bytes=0, counter=None, place=None, event=None, waits=None)
    assert read_handles(sent([{"a": nothing}]), None).by_gpu[0]["GPU-a"].counter == ("", 0)


@pytest.mark.parametrize(
    ("tensors", "found", "sizes"),
    [
        ([("x", "BF16", (3, 2))], [{"a": arguments(2, 3)}], None),
        ([("x", "F16", (2, 3))], [{"a": arguments(2, 3)}], None),
        ([("x", "BF16", (2, 3))], [{"a": arguments(2, 3), "b": arguments(6)}], None),
        ([("x", "BF16", (2, 3))], [{"a": arguments(2, 3)}] * 2, None),
        ([("x", "U8", (60,)), ("y", "U8", (41,))], {"a": arguments(100, dtype=torch.uint8)}, [60, 41]),
        ([("x", "U8", (60,)), ("y", "U8", (40,))], {"a": arguments(100, dtype=torch.uint8)}, [40, 60]),
        ([("x", "U8", (60,))], {"a": arguments(100)}, [60]),
    ],
)
def test_handles_of_other_tensors_than_the_call_names_are_refused(
    tensors: list[tuple[str, str, tuple[int, ...]]], found: Any, sizes: list[int] | None
) -> None:
    with pytest.raises(HandlesRefusedError, match=r"trainer's memory|handles|hold the tensors"):
        read_handles(sent(found), sizes).check(tensors)


class Calls:
    """Whose pickle makes a folder."""

    def __init__(self, call: Callable[..., Any], *given: Any) -> None:
        self._reduced = (call, given)

    def __reduce__(self) -> Any:
        return self._reduced


def nested(depth: int) -> bytes:
    """A tuple of a tuple twice, and so on: with hashes, or a text of it, there would be no end."""
    return b"\x80\x04)" + b"".join(b"\x94h%c\x86" % n for n in range(depth)) + b"."


ATTACKS = {
    "a call": pickle.dumps([{"GPU": Calls(os.mkdir, "made")}]),
    "a call in a handle": pickle.dumps([{"GPU": (Calls(os.mkdir, "made"), *arguments(1)[1:])}]),
    "a call of protocol 0": pickle.dumps(Calls(os.mkdir, "made"), protocol=0),
    "inst": b"(S'made'\nios\nmkdir\n.",
    "obj": b"(cos\nmkdir\nS'made'\no.",
    "a global of another module": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93.",
    "a dtype of another module": b"\x80\x04\x8c\x02os\x8c\x07float32\x93.",
    "an extension": b"\x80\x04\x82\x01.",
    "build": b"\x80\x04]}b.",
    "a persistent id": b"\x80\x04\x8c\x01aQ.",
    "a memo that is not there": b"\x80\x04h\x07.",
    "an empty stack": b"\x80\x04.",
    "a mark that is not there": b"\x80\x04t.",
    "no end": b"\x80\x04]",
    "nothing": b"",
    "a tuple of tuples": nested(80),
    "tuples as a key": b"\x80\x04}" + nested(80)[2:-1] + b"Ns.",
    "a size of tuples": b"\x80\x04ctorch\nSize\n" + nested(60)[2:-1] + b"\x85R.",
    "text that is too long": b"\x80\x04\x8d" + (2**63 - 1).to_bytes(8, "little") + b"x.",
    "another class": pickle.dumps([{"GPU": arguments(1, kind=dict)}]),
    "another counter": pickle.dumps([{"GPU": arguments(1, counter=b"/../etc/passwd")}]),
    "a counter beyond its file": pickle.dumps([{"GPU": arguments(1, place=10_000)}]),
    "a counter before its file": pickle.dumps([{"GPU": arguments(1, place=-1)}]),
    "a negative size": pickle.dumps([{"GPU": arguments(1, size=(-1,))}]),
    "a size without end": pickle.dumps([{"GPU": arguments(1, size=(2**53,) * 100)}]),
    "a negative offset": pickle.dumps([{"GPU": arguments(1, offset=-1)}]),
    "an end beyond the storage": pickle.dumps([{"GPU": arguments(1, offset=2048)}]),
    "columns": pickle.dumps([{"GPU": arguments(2, 3, stride=(1, 2))}]),
    "fewer strides": pickle.dumps([{"GPU": arguments(2, 3, stride=(3,))}]),
    "expandable segments": pickle.dumps([{"GPU": arguments(1, handle=b"\x02e" + ALLOCATION)}]),
    "a handle that is text": pickle.dumps([{"GPU": arguments(1, handle="h")}]),
    "too few arguments": pickle.dumps([{"GPU": arguments(1)[:-1]}]),
    "a number": pickle.dumps(1),
    "no handles": pickle.dumps([]),
    "no GPU": pickle.dumps([{}]),
    "a buffer without sizes": pickle.dumps({"GPU": arguments(1)}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_handles_is_refused_in_a_sentence_and_nothing_of_it_is_called(
    attack: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HandlesRefusedError, match=r"handle|pickle"):
        read_handles(base64.b64encode(ATTACKS[attack]).decode(), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "no base64!", "é"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(HandlesRefusedError):
        read_handles(text, None)
