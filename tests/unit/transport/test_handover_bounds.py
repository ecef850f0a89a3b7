"""A tensor that an offer names lies inside its allocation, as the driver knows it and not as the offer says."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from refitd_client.transport import device
from refitd_client.transport.device import DeviceMemory, DriverError

BASE, SIZE = 0x7000_0000, 4096
LENT = (b"h" * 64, 3)


class Driver:
    """Opens one allocation of `SIZE` bytes, and counts what is open."""

    def __init__(self, error: int = 0) -> None:
        self.open, self.error = 0, error

    def cuIpcOpenMemHandle_v2(self, base: Any, *_: Any) -> int:  # noqa: N802 - the driver's name
        ctypes.cast(base, ctypes.POINTER(ctypes.c_uint64))[0] = BASE
        self.open += 1
        return 0

    def cuMemGetAddressRange_v2(self, first: Any, size: Any, _: Any) -> int:  # noqa: N802 - likewise
        ctypes.cast(first, ctypes.POINTER(ctypes.c_uint64))[0] = BASE
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = SIZE
        return self.error

    def cuIpcCloseMemHandle(self, _: Any) -> int:  # noqa: N802 - likewise
        self.open -= 1
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(device, "_driver", lambda: made)
    monkeypatch.setattr(device, "_context_of", lambda _: nullcontext())
    return made


@pytest.mark.parametrize("end", [0, 1, SIZE])
def test_what_lies_inside_is_given(driver: Driver, end: int) -> None:
    assert DeviceMemory().addresses({LENT: end}, 0) == {LENT: BASE}
    assert driver.open == 1


@pytest.mark.parametrize("end", [SIZE + 1, 2**40])
def test_what_ends_beyond_its_allocation_is_refused(driver: Driver, end: int) -> None:
    memory = DeviceMemory()
    for _ in range(2):  # also where it is open already
        with pytest.raises(DriverError, match=f"ends at byte {end} of an allocation that has {SIZE}"):
            memory.addresses({LENT: end}, 0)
    memory.keep(set())
    assert driver.open == 0


def test_a_tensor_that_ends_beyond_its_allocation_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "uuid_of", lambda _: "GPU-1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    place = device.DevicePlace("GPU-1", LENT[0], LENT[1], SIZE - 8)
    with pytest.raises(DriverError, match="ends at byte 4104"):
        DeviceMemory().tensor(place, "BF16", (8,))


def test_an_allocation_whose_size_the_driver_does_not_say_is_opened_all_the_same(driver: Driver) -> None:
    driver.error = 1
    assert DeviceMemory().addresses({LENT: SIZE + 1}, 0) == {LENT: BASE}


def test_an_offer_s_ends_are_those_of_its_tensors() -> None:
    from refitd_client.transport.offer import DevicePlace, OfferedTensor, OfferLayout
    from refitd_plugin.memory.imported import OpenedMemory

    other = b"i" * 64
    places = [(b"h" * 64, 0, (4,)), (b"h" * 64, 512, (2, 2)), (other, 8, (1,)), (b"h" * 64, 9999, (0,))]
    tensors = tuple(
        OfferedTensor(str(number), "F32", shape, DevicePlace("GPU-1", handle, 3, offset))
        for number, (handle, offset, shape) in enumerate(places)
    )
    layout = OfferLayout(host="a", boot="b", pid=1, life="c", tensors=tensors)
    opened = OpenedMemory(exporter=SimpleNamespace(), layout=layout)  # type: ignore[arg-type]
    assert opened.ends == {(b"h" * 64, 3): 528, (other, 3): 12}
