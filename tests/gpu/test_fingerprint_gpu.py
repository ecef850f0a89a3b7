"""On a GPU: the triton kernel, torch's operations and numpy compute the same fingerprints; shadows find the same.

    PYTHONPATH=client python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -s

Skipped without CUDA. `-s` shows the rates, which no test depends on.
"""

import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton")

from refitd_client import torch_tensors  # noqa: E402
from refitd_client.casts import Casts  # noqa: E402
from refitd_client.delta import device  # noqa: E402
from refitd_client.delta.shadow import Shadow  # noqa: E402
from refitd_client.fingerprint import fingerprints, kernel, twin  # noqa: E402
from refitd_client.fingerprint.definition import ROW  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool]


def random_tensor(dtype: Any, count: int) -> Any:
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), device="cuda").bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    return raw.view(dtype)


def by_kernel(tensor: Any) -> int:
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel.add_fingerprint(twin.flat_bits(tensor), out)
    return twin.to_int(out[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5, ROW - 1, ROW, ROW + 1, 3 * ROW + 17, 2000 * ROW + 3])
def test_kernel_twin_and_numpy_agree(dtype: Any, count: int) -> None:
    """From one element to more rows than the kernel has programs."""
    tensor = random_tensor(dtype, count)
    expected = fingerprints([tensor.cpu()])[0]
    assert by_kernel(tensor) == expected
    assert twin.to_int(twin.fingerprint(twin.flat_bits(tensor))) == expected


def test_a_tensor_of_more_than_two_to_the_31_elements() -> None:
    """Where 32 bits of index end."""
    tensor = torch.zeros(2**31 + 2 * ROW, dtype=torch.uint8, device="cuda")
    before = by_kernel(tensor)
    at = torch.tensor([3, 2**31 - 1, 2**31, 2**31 + ROW + 1], device="cuda")
    old = tensor[at]
    tensor[at] = 77
    shift = twin.to_int(twin.share(at, tensor[at])) - twin.to_int(twin.share(at, old))
    assert by_kernel(tensor) == (before + shift) % 2**64


def test_many_tensors_on_two_places_come_back_in_order() -> None:
    tensors = [random_tensor(torch.bfloat16, 5000 + n) for n in range(20)]
    mixed = [each if n % 3 else each.cpu() for n, each in enumerate(tensors)]
    assert fingerprints(mixed) == fingerprints([each.cpu() for each in tensors])


@pytest.mark.parametrize("kind", [device.DeviceShadow, device.StreamShadow])
def test_a_shadow_finds_what_changed(kind: type[Shadow], monkeypatch: pytest.MonkeyPatch) -> None:
    """In several groups and chunks; three times, so that every buffer is used again."""
    monkeypatch.setattr(device, "_BATCH", 2**20)
    monkeypatch.setattr(device, "_CHUNK", 2**20)
    state = {f"w{n}": torch.randn(1000, 777 + n, device="cuda", dtype=torch.bfloat16) for n in range(7)}
    state["f"] = torch.randn(300, 300, device="cuda").T
    sources = [torch_tensors.source(name, tensor, Casts()) for name, tensor in state.items()]
    shadow = kind()
    known = shadow.keep(sources)
    for turn in range(3):
        old = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.copy_(torch.where(torch.rand(tensor.shape, device="cuda") < 0.01, tensor + 1 + turn, tensor))
        found = shadow.find(sources)
        for name, tensor in state.items():
            now, before = (twin.flat_bits(each).cpu().numpy() for each in (tensor, old[name]))
            expected = np.flatnonzero(now != before)
            assert np.array_equal(found[name].indices, expected)
            assert np.array_equal(found[name].values.view(now.dtype), now[expected])
            known[name] = (known[name] + found[name].shift) % 2**64
            assert np.array_equal(shadow.gather(name, found[name].indices), found[name].values)
        assert known == dict(zip(state, fingerprints(list(state.values())), strict=True))


def test_rates() -> None:
    """Shown and not judged: 3 GB of bf16 in 300 tensors, 1 % changed."""
    state = {f"w{n}": torch.randn(5_000_000, device="cuda", dtype=torch.bfloat16) for n in range(300)}
    sources = [torch_tensors.source(name, tensor, Casts()) for name, tensor in state.items()]
    size = sum(tensor.nbytes for tensor in state.values())
    for name, work in [("fingerprints", lambda: fingerprints(list(state.values())))]:
        print(f"\n{name}: {_milliseconds(work)} ms for {size / 1e9:.2f} GB")
    for kind in (device.DeviceShadow, device.StreamShadow):
        shadow = kind()
        shadow.keep(sources)

        def turn(shadow: Shadow = shadow) -> None:
            shadow.find(sources)

        print(f"{kind.__name__}.find: {_milliseconds(turn, lambda: _change(state))} ms")


def _change(state: dict[str, Any]) -> None:
    for tensor in state.values():
        at = torch.randint(0, tensor.numel(), (tensor.numel() // 100,), device="cuda")
        tensor[at] += 1


def _milliseconds(work: Any, prepare: Any = lambda: None) -> list[float]:
    taken: list[float] = []
    for _ in range(5):
        prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(round((time.perf_counter() - began) * 1000, 1))
    return taken
