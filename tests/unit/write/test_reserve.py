"""Room for a delta's file, taken ahead: the file is the same, and what was taken in vain leaves nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from refitd_client import NoSpaceError, WeightPublisher
from refitd_client.contract import manifest as digest
from refitd_client.contract.manifest import FileDigest, parse_manifest
from refitd_client.contract.states import Kind
from refitd_client.delta import DeltaRules, read_delta, reserve
from refitd_client.delta.reserve import Reserve
from refitd_client.files import durable
from support import published
from support.stand_in_service import StandIn, make_engine, stand_in


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a tmpfs: elsewhere nothing is taken ahead."""
    made = Path(tempfile.mkdtemp(prefix="refitd-reserve-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        yield service


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were made without a name and got one. However small they are, and by several threads."""
    found: list[Path] = []
    real = durable.give_name
    monkeypatch.setattr(reserve, "_LEAST", 1)
    monkeypatch.setattr(reserve, "_THREADS_FROM", 1)
    monkeypatch.setattr(durable, "give_name", lambda fd, path: (real(fd, path), found.append(path)))
    return found


def digest_of(data: bytes) -> str:
    found = FileDigest()
    found.update(data)
    return found.text


def publish(folder: Path, service: StandIn, changes: list[int]) -> list[Path]:
    """A full version, and a delta of so many changed elements for each of `changes`; all are read back and checked."""
    state = {"w": np.zeros(100_000, np.float32)}
    paths: list[Path] = []
    with WeightPublisher(folder, "run", service.url, delta_rules=DeltaRules(threshold=1.0)) as publisher:
        for step, changed in enumerate([0, *changes], 1):
            state["w"][:changed] += 1
            done = publisher.publish(state, step=step, delta="auto")
            service.engines = [make_engine(version=done.version_id, step=step, run="run")]
            if step > 1:
                assert done.kind is Kind.DELTA
                data = (done.path / "weights.refit-delta").read_bytes()
                claimed = parse_manifest((done.path / "refit.json").read_bytes()).files["weights.refit-delta"]
                assert (claimed.size, claimed.digest) == (len(data), digest_of(data))
                delta = read_delta(done.path / "weights.refit-delta")
                assert delta.changes["w"].values.view(np.float32).tolist() == state["w"][:changed].tolist()
                paths.append(done.path)
    return paths


def test_a_delta_in_reserved_room_is_the_same_file(
    folder: Path, service: StandIn, named: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the size that it should have, whether it takes less than was reserved, or more; and of several blocks."""
    monkeypatch.setattr(digest, "BLOCK", 10_000)
    monkeypatch.setattr(reserve, "_JOB", 10_000)
    monkeypatch.setattr(reserve, "lanes_for", lambda jobs: 4)
    paths = publish(folder, service, [5000, 5100, 300, 90_000, 80_000])
    assert [path.parent.name[:9] for path in named] == [".incoming"] * 4
    sizes = [(path / "weights.refit-delta").stat() for path in paths]
    assert all(size.st_blocks * 512 <= size.st_size + 2**16 for size in sizes), "what was too much was given back"


def held_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open or mapped. The kernel keeps their blocks as long as it has."""
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in opened + mapped if f"{folder}/" in line]


def test_what_was_reserved_in_vain_leaves_nothing(folder: Path) -> None:
    """Neither a name nor blocks."""
    room = Reserve(folder)
    room.expect(2**24, None)
    room.begin()
    room.begin()
    taken = room.take()
    assert taken is not None
    assert held_in(folder), "the file is open and mapped"
    os.close(taken.fd)
    del taken
    room.begin()
    assert list(folder.iterdir()) == []
    room.close()
    assert room.take() is None
    assert held_in(folder) == []


def test_without_room_ahead_a_delta_is_written_all_the_same(
    folder: Path, service: StandIn, named: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "reserve", full)
    publish(folder, service, [5000, 5100])
    assert named == []


def test_a_file_system_that_is_full_when_the_room_is_too_small(
    folder: Path, service: StandIn, named: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, and no signal that kills the trainer; nothing is visible."""
    real = durable.reserve

    def up_to(fd: int, size: int) -> None:
        if size > 100_000:
            raise OSError(28, "No space left on device")
        real(fd, size)

    monkeypatch.setattr(durable, "reserve", up_to)
    with pytest.raises(NoSpaceError):
        publish(folder, service, [5000, 90_000])
    assert published.leftovers(folder / "run") == []
    assert not (folder / "run" / "v000003").exists()


def test_on_a_disk_nothing_is_taken_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "is_tmpfs", lambda _: False)
    room = Reserve(tmp_path)
    room.expect(2**24, None)
    room.begin()
    assert room.take() is None
