"""The way of tensors from a GPU, with host memory in its place: everything but the copy engine (see tests/gpu)."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from refitd_client import InvalidWeightsError, Publication, PublishOptions, WeightPublisher
from refitd_client import tensors as torch_tensors
from refitd_client.contract.manifest import fitting_fingerprints, parse_manifest
from refitd_client.contract.naming import slots_path
from refitd_client.fingerprint import fingerprints
from refitd_client.write import cuda, device_shards
from refitd_client.write.device_shards import DeviceShards
from support import published
from support.handed_back import hand_back
from support.host_gpu import Stream, trainer_gpu

GPU = torch.device("cpu").index
"""The number of the one that the tensors are on. It is not that of the current one."""


class Driver:
    """Counts what it is asked to register."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.refuses = False

    def register(self, address: int, count: int, device: int | None) -> int:
        assert device == GPU
        self.registered.append(address)
        return 2 if self.refuses else 0

    def unregister(self, address: int, device: int | None) -> None:
        assert device == GPU
        self.registered.remove(address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    trainer_gpu(monkeypatch)
    monkeypatch.setattr(cuda, "pin", driver.register)
    monkeypatch.setattr(cuda, "unpin", driver.unregister)
    monkeypatch.setattr(cuda, "_CUDA_PIECE", 1000)
    return driver


@pytest.fixture(params=["torch", "address"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How copies are begun, and the sizes of those that are by address, as the driver wants them."""
    sizes: list[int] = []

    def copy(way: str, target: int, source: int, count: int, stream: Any) -> None:
        assert (way, stream.cuda_stream) == ("down", 7)
        sizes.append(count)
        cuda.copy_here(target, source, count)

    monkeypatch.setattr(cuda, "copy", copy)
    monkeypatch.setattr(cuda, "has_driver", lambda: request.param == "address")
    return sizes


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="refitd-device-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def publisher(root: Path, driver: Driver) -> Iterator[WeightPublisher]:
    with WeightPublisher(root, "run", options=PublishOptions(max_shard_bytes=4096)) as opened:
        yield opened


def state(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(33, 57, generator=chance).to(torch.float16),
        "transposed": torch.randn(30, 20, generator=chance).t(),
        "scalar": torch.tensor(1.5 + seed),
        "nothing": torch.empty(0, 4),
        "here": torch.arange(seed, seed + 10, dtype=torch.int32),
    }


def expect(version: Path, seed: int) -> None:
    published.check(version)
    got = {name: tensor for shard in published.shards(version) for name, tensor in load_file(shard).items()}
    assert all(torch.equal(got[name], tensor) for name, tensor in state(seed).items())


def _publish(publisher: WeightPublisher, weights: dict[str, torch.Tensor], step: int, block: Any) -> Publication:
    done: Any = publisher.publish(weights, step=step, block=block)
    return done.committed() if block == "staged" else done


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("block", ["committed", "staged"])
def test_into_new_files_and_into_slots(
    root: Path, by: list[int], publisher: WeightPublisher, driver: Driver, block: Any, refuses: bool
) -> None:
    is_by_address = cuda.has_driver() and not refuses
    driver.refuses = refuses
    for step in range(1, 5):
        done = _publish(publisher, state(step), step, block)
        expect(done.path, step)
        hand_back(root, done.path)
    files = len(list((root / slots_path("run")).glob("*/*")))
    assert len(driver.registered) == files > 1, "each file once, also where that is refused"
    assert bool(by) == is_by_address, "from the second version on"


def test_a_cast_is_made_on_the_device(root: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that is there goes through host memory, and what arrives is what is published."""
    monkeypatch.setattr(torch_tensors, "_read", lambda held, _: held.value.numpy().view(np.uint8))  # of `here` alone
    with WeightPublisher(
        root, "run", options=PublishOptions(max_shard_bytes=4096, dtype=torch.bfloat16, fingerprints=True)
    ) as publisher:
        path = publisher.publish(state(1), step=1).path
    got = {name: tensor for shard in published.shards(path) for name, tensor in load_file(shard).items()}
    expected = {name: tensor if name == "here" else tensor.bfloat16() for name, tensor in state(1).items()}
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    found = dict(zip(expected, fingerprints(expected.values()), strict=True))
    assert parse_manifest((path / "refit.json").read_bytes()).fingerprints == fitting_fingerprints(found)


def test_a_file_that_no_gpu_writes_to_is_not_registered(
    root: Path, by: list[int], publisher: WeightPublisher, driver: Driver
) -> None:
    """It would be with whichever GPU is current, which may be one that this process has no business on."""
    mixed = {"a": torch.arange(2000, dtype=torch.int32), "b": torch.ones(10, dtype=torch.int32), "c": torch.ones(500)}
    for step in (1, 2, 3):
        path = publisher.publish(mixed, step=step).path
        published.check(path)
        assert len(published.shards(path)) == 2
        hand_back(root, path)
    assert len(driver.registered) == 1


def test_what_was_registered_is_given_back(root: Path, publisher: WeightPublisher, driver: Driver) -> None:
    for step in (1, 2):
        hand_back(root, publisher.publish(state(step), step=step).path)
    assert driver.registered
    shutil.rmtree(root / slots_path("run"))
    publisher.publish(state(3), step=3)
    assert driver.registered == []
    hand_back(root, root / "run" / "v000003")
    publisher.publish(state(4), step=4)
    assert driver.registered
    publisher.close()
    assert driver.registered == []


@pytest.mark.parametrize("block", ["committed", "staged"])
def test_a_failure_waits_for_the_copies_before_the_slot_goes(
    root: Path, publisher: WeightPublisher, block: Any
) -> None:
    hand_back(root, publisher.publish(state(1), step=1).path)
    bad = state(2)
    bad["wide"][3, 3] = float("inf")
    waits = Stream.waits
    with pytest.raises(InvalidWeightsError, match="tensor wide"):
        _publish(publisher, bad, 2, block)
    assert Stream.waits > waits
    assert published.leftovers(root / "run") == []


def many(seed: int) -> dict[str, torch.Tensor]:
    """Eight tensors, each in a file of its own."""
    chance = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(4096, generator=chance) for number in range(8)}


def test_few_copies_are_begun_before_the_bus_is_waited_for(
    root: Path, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's queue is short: who fills it waits in the driver, and keeps every other thread waiting."""
    marks: list[int] = []
    waited: list[int] = []

    flushed = cuda.DeviceCopies.mark

    def mark(self: cuda.DeviceCopies) -> Any:
        flushed(self)
        number = len(marks)
        marks.append(number)

        def arrived() -> None:
            if threading.current_thread() is threading.main_thread():
                waited.append(len(marks) - number)

        return arrived

    monkeypatch.setattr(cuda.DeviceCopies, "mark", mark)
    monkeypatch.setattr(device_shards, "_MARKS_AHEAD", 3)
    publisher.publish(many(1), step=1)
    assert (len(marks), waited) == (8, [4] * 5)


def test_copies_of_many_small_tensors_are_waited_for_as_well(
    root: Path, by: list[int], publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_shards, "MOST_UNMARKED", 4)
    monkeypatch.setattr(device_shards, "_ENTRIES_AHEAD", 10)
    far: list[int] = []
    real = device_shards.CopiesAhead.wait
    monkeypatch.setattr(device_shards.CopiesAhead, "wait", lambda self: (far.append(self._entries), real(self)))
    small = {f"w{number:02}": torch.full((3,), float(number)) for number in range(40)}
    hand_back(root, publisher.publish(small, step=1).path)
    far.clear()
    published.check(publisher.publish(small, step=2).path)
    assert far == [15] * 8


def test_blocks_are_digested_while_later_copies_have_not_begun(
    root: Path, by: list[int], publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who begins late ends late: digests are hardly faster than the bus."""
    digested = threading.Event()
    real, copy = device_shards.digest_of_block, cuda.DeviceCopies.copy

    def digest(data: Any) -> bytes:
        digested.set()
        return real(data)

    def begin(self: cuda.DeviceCopies, source: Any, *rest: Any) -> None:
        assert source.entry.name != "w7" or digested.wait(10)
        copy(self, source, *rest)

    monkeypatch.setattr(device_shards, "digest_of_block", digest)
    monkeypatch.setattr(cuda.DeviceCopies, "copy", begin)
    hand_back(root, publisher.publish(many(1), step=1).path)
    digested.clear()
    published.check(publisher.publish(many(2), step=2).path)


def test_a_wait_for_the_copies_that_is_interrupted_leaves_nobody_writing(
    root: Path, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the closed descriptors are soon somebody else's."""
    hand_back(root, publisher.publish(state(1), step=1).path)
    at_work, interrupted, raised, at_it = threading.Event(), threading.Event(), threading.Event(), list[int]()
    digest = DeviceShards._digest

    def slow(*args: Any) -> None:
        at_it.append(1)
        at_work.set()
        raised.wait(0.2)  # whoever does not wait for this lane has raised by then
        digest(*args)
        at_it.pop()

    def interrupt(self: Stream) -> None:
        if threading.current_thread() is threading.main_thread() and not interrupted.is_set():
            assert at_work.wait(30)
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(DeviceShards, "_digest", slow)
    monkeypatch.setattr(Stream, "synchronize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(state(2), step=2, block="staged")
    still, _ = len(at_it), raised.set()
    assert still == 0
    assert published.leftovers(root / "run") == []
