"""On a GPU: the triton kernels, torch's operations and numpy find the same fingerprints, NaN and changes.

    PYTHONPATH=client:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -s

Skipped without CUDA. `-s` shows the rates, which no test depends on.
"""

from typing import Any

import numpy as np
import pytest

from support.fingerprint_definition import to_int

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton")

from refitd_client import tensors as torch_tensors  # noqa: E402
from refitd_client.delta import compare  # noqa: E402
from refitd_client.delta import device as delta_device  # noqa: E402
from refitd_client.delta.shadow import HostShadow, Shadow  # noqa: E402
from refitd_client.fingerprint import device, fingerprints, kernel  # noqa: E402
from refitd_client.fingerprint.device import Listed, Rows, whole_tensor  # noqa: E402
from refitd_client.fingerprint.host import ROW  # noqa: E402
from refitd_client.tensors import Casts  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool]


def random_tensor(dtype: Any, count: int) -> Any:
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), device="cuda").bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, device="cuda")
    return raw.view(dtype)


def by_kernel(tensor: Any) -> int:
    out = torch.zeros((1, 2), dtype=torch.int64, device="cuda")
    bits = device.flat_bits(tensor)
    kernel.add_scan(Rows(Listed([whole_tensor(0, bits)]), bits.device), out)
    return to_int(out[0, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 5, ROW - 1, ROW, ROW + 1, 3 * ROW + 17, 2000 * ROW + 3])
def test_kernel_twin_and_numpy_agree(dtype: Any, count: int) -> None:
    """From one element to more rows than the kernel has programs."""
    tensor = random_tensor(dtype, count)
    expected = fingerprints([tensor.cpu()])[0]
    assert by_kernel(tensor) == expected
    assert to_int(device.fingerprint(device.flat_bits(tensor))) == expected


def test_a_tensor_of_more_than_two_to_the_31_elements() -> None:
    """Where 32 bits of index end."""
    tensor = torch.zeros(2**31 + 2 * ROW, dtype=torch.uint8, device="cuda")
    before = by_kernel(tensor)
    at = torch.tensor([3, 2**31 - 1, 2**31, 2**31 + ROW + 1], device="cuda")
    old = tensor[at]
    tensor[at] = 77
    shift = to_int(device.share(at, tensor[at])) - to_int(device.share(at, old))
    assert by_kernel(tensor) == (before + shift) % 2**64


def changing_state() -> dict[str, Any]:
    """Aligned and not, cut into several parts, of several widths, transposed, empty."""
    state = {f"w{n}": torch.randn(1000, 777 + n, device="cuda", dtype=torch.bfloat16) for n in range(7)}
    state["f"] = torch.randn(300, 300, device="cuda").T
    state["odd"] = torch.randn(100_001, device="cuda", dtype=torch.float16)[1:]
    state["bytes"] = torch.randint(0, 200, (70_000,), device="cuda", dtype=torch.uint8)
    state["long"] = torch.randn(20_000, device="cuda", dtype=torch.float64)
    state["empty"] = torch.empty(0, 3, device="cuda")
    return state


@pytest.mark.parametrize("kind", [delta_device.DeviceShadow, delta_device.StreamShadow])
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_shadow_finds_what_changed(kind: type[Shadow], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one in host memory does. In several parts and chunks; three times, so that every room is used again."""
    monkeypatch.setattr(delta_device, "CHUNK", 2**20)
    monkeypatch.setattr(delta_device, "LONGEST", 2**16)
    monkeypatch.setattr(compare, "ROOM", 2**20)
    monkeypatch.setattr(delta_device, "_CHANGES_ROOM", 2**14)
    state = changing_state()
    shadow, host = kind(), HostShadow()
    known = shadow.keep(sources_of(state))
    assert known == host.keep(sources_of({name: tensor.cpu() for name, tensor in state.items()}))
    for turn in range(3):
        for tensor in state.values():
            tensor.copy_(torch.where(torch.rand(tensor.shape, device="cuda") < share, tensor + 1 + turn, tensor))
        state["w3"][turn, 3] = float("nan")
        changes = shadow.find(sources_of(state), 2**62)
        expected = host.find(sources_of({name: tensor.cpu() for name, tensor in state.items()}), 2**62)
        assert changes.count == expected.count > 0
        assert changes.shifts == expected.shifts
        assert changes.nonfinite == expected.nonfinite
        assert changes.found.keys() == expected.found.keys()
        for name, found in expected.found.items():
            assert np.array_equal(changes.found[name].indices, found.indices), name
            assert np.array_equal(changes.found[name].values, found.values), name
        where = {name: found.indices for name, found in expected.found.items()}
        gathered = shadow.gather(where)
        assert all(np.array_equal(gathered[name], found.values) for name, found in expected.found.items())
    shadow.close()


def sources_of(state: dict[str, Any]) -> list[Any]:
    return [torch_tensors.torch_source(name, tensor, Casts()) for name, tensor in state.items()]
