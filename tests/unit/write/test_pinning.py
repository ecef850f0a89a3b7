"""How the CUDA driver is asked to lock memory, with a stand-in for it (the real one: tests/gpu/test_slots_gpu.py)."""

from typing import Any

import pytest

from refitd_client.write import cuda


class Driver:
    """Notes calls; fails those that `errors` names."""

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, *(getattr(arg, "value", None) for arg in args if hasattr(arg, "value"))))
            return self.errors.get(name, 0)

        return call


def using(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_driver", lambda: driver)


def names(driver: Driver) -> list[str]:
    return [name for name, *_ in driver.calls]


AROUND = (["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"], ["cuCtxPopCurrent_v2"])
GIVEN_BACK = ["cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_locked_in_the_gpu_s_context_and_the_thread_is_left_as_it_was(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(cuMemHostRegister_v2=error)
    using(driver, monkeypatch)
    assert cuda.pin(2**47, 2**33, 1, cuda.PORTABLE | cuda.READ_ONLY) == error
    assert names(driver) == [*AROUND[0], "cuMemHostRegister_v2", *AROUND[1], *GIVEN_BACK]
    assert ("cuMemHostRegister_v2", 2**47, 2**33) in driver.calls, "a place or a size was cut to 32 bits"
    cuda.unpin(2**47, 1)
    assert names(driver)[-6:] == [*AROUND[0], "cuMemHostUnregister", *AROUND[1], *GIVEN_BACK]


@pytest.mark.parametrize("fails", AROUND[0])
def test_where_there_is_no_context_nothing_is_locked_and_nothing_kept(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(**{fails: 4})
    using(driver, monkeypatch)
    assert cuda.pin(4096, 4096, 0) == 4
    cuda.unpin(4096, 0)
    assert not {"cuMemHostRegister_v2", "cuMemHostUnregister", "cuCtxPopCurrent_v2"} & set(names(driver))
    assert names(driver).count("cuDevicePrimaryCtxRelease_v2") == (2 if fails == "cuCtxPushCurrent_v2" else 0)


def test_without_a_driver_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    using(None, monkeypatch)
    assert cuda.pin(4096, 4096, 0) != 0
    cuda.unpin(4096, 0)
