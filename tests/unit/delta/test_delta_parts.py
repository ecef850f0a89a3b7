"""What a GPU finds in parts of tensors, by its operations on any device, is said of the whole tensors."""

import numpy as np
import pytest
import torch

from refitd_client.delta import compare, device
from refitd_client.delta.shadow import ChangedElements
from refitd_client.fingerprint import fingerprints
from refitd_client.fingerprint.tensors import ElementRows, PartPlace
from refitd_client.tensors import Casts, TensorSource, torch_source

SHAPE = (300, 64)
PLACES = {
    "rows": [ElementRows(64 * 16, 64 * 100)],
    "columns": [ElementRows(16, 32, rows=300, pitch=64)],
    "uneven": [ElementRows(5, 3, rows=40, pitch=64), ElementRows(64 * 50 + 1, 7001)],
    "one": [ElementRows(64 * 300 - 1, 1)],
}


def indices_of(strips: list[ElementRows]) -> list[int]:
    begins = [each.begin + row * each.pitch for each in strips for row in range(each.rows)]
    widths = [each.width for each in strips for _ in range(each.rows)]
    return [begin + at for begin, width in zip(begins, widths, strict=True) for at in range(width)]


def sources(whole: torch.Tensor) -> list[TensorSource]:
    """A copy of each part, as a rank has them."""
    flat = whole.reshape(-1)
    return [torch_source(name, flat[indices_of(strips)].contiguous(), Casts(())) for name, strips in PLACES.items()]


@pytest.mark.parametrize("kind", [device.DeviceShadow, device.StreamShadow])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_changed_in_a_part_is_said_by_the_whole_tensors_indices_and_fingerprint(
    kind: type[device.DeviceShadow | device.StreamShadow], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small groups, chunks and buffers, so that strips and rows are cut."""
    monkeypatch.setattr(device, "LONGEST", 2**12)
    monkeypatch.setattr(device, "CHUNK", 2**15)
    monkeypatch.setattr(compare, "ROOM", 60)
    monkeypatch.setattr(device, "_CHANGES_ROOM", 60)
    torch.manual_seed(1)
    before = torch.randn(SHAPE).to(dtype)
    after = before.clone()
    after.view(-1)[torch.randint(0, after.numel(), (400,))] += 1
    after[-1, -1] = float("nan")
    shadow = kind({name: PartPlace(strips, before.numel()) for name, strips in PLACES.items()})
    assert shadow.keep(sources(before)) == {}
    diff = shadow.find(sources(after), 10**6)
    differs = (before != after).reshape(-1)
    for name, strips in PLACES.items():
        wanted = [at for at in indices_of(strips) if differs[at]]
        found = diff.found[name]
        assert found.indices.tolist() == wanted
        assert found.indices.dtype == np.uint32
        assert found.before is None
        moved = before.clone()
        moved.view(-1)[wanted] = after.view(-1)[wanted]
        shift = fingerprints([moved])[0] - fingerprints([before])[0]
        assert diff.shifts.get(name, 0) == shift % 2**64
        assert found.values.tolist() == bits_at(moved, wanted)
    assert diff.nonfinite == {"one": 1}
    assert shadow.find(sources(after), 10**6).found == {}


def bits_at(tensor: torch.Tensor, at: list[int]) -> list[int]:
    bits = tensor.reshape(-1)[at].view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy()
    return bits.view(f"u{tensor.itemsize}").tolist()


def test_a_part_of_a_tensor_of_more_elements_than_32_bits_count_has_long_indices() -> None:
    place = PartPlace([ElementRows(2**33, 10)], 2**34)
    now = torch.arange(10, dtype=torch.bfloat16)
    shadow = device.DeviceShadow({"t": place})
    shadow.keep([torch_source("t", now, Casts(()))])
    later = now.clone()
    later[3] = -1
    found: ChangedElements = shadow.find([torch_source("t", later, Casts(()))], 10).found["t"]
    assert (found.indices.tolist(), found.indices.dtype) == ([2**33 + 3], np.uint64)
