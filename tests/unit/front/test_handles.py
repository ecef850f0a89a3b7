"""Handles of GPU memory, as pickles that are read and never loaded."""

import base64
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from refitd_front.handles import HandlesRefusedError, read_handles

COUNTER = b"/torch_4711_3_0"


def arguments(*shape: int, dtype: torch.dtype = torch.bfloat16, **other: Any) -> tuple[Any, ...]:
    """What torch's `reduce_tensor` gives for a tensor on a GPU, beside the function (torch 2.13)."""
    tensor = torch.zeros(shape, dtype=dtype)
    given = {"kind": type(tensor), "counter": COUNTER, "handle": b"h" * 66, **other}
    storage = type(tensor._typed_storage())
    return (
        given["kind"], tensor.size(), tensor.stride(), 0, storage, tensor.dtype, 0, given["handle"], 4096, 512, False,
        given["counter"], 8, b"e" * 64, True,
    )  # fmt: skip


def sent(found: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> str:
    return base64.b64encode(pickle.dumps(found, protocol=protocol)).decode()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_handles_of_each_tensor_and_of_a_buffer_are_read_as_they_were_sent(protocol: int) -> None:
    kinds = [arguments(2, 3), arguments(dtype=torch.float32), arguments(7, kind=torch.nn.Parameter)]
    listed = read_handles(sent([{"GPU-a": each, "GPU-b": each} for each in kinds], protocol), None)
    assert not listed.is_packed
    assert [each["GPU-b"].size for each in listed.by_gpu] == [(2, 3), (), (7,)]
    first = listed.by_gpu[0]["GPU-a"]
    assert (first.stride, first.dtype, first.handle) == ((3, 1), "bfloat16", b"h" * 66)
    assert (first.storage_bytes, first.storage_offset, first.counter, first.counter_offset) == (4096, 512, COUNTER, 8)
    assert (first.event, first.event_sync) == (b"e" * 64, True)
    packed = read_handles(sent({"GPU-a": arguments(100, dtype=torch.uint8)}, protocol), [60, 40])
    assert packed.is_packed
    assert packed.by_gpu[0]["GPU-a"].dtype == "uint8"


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
