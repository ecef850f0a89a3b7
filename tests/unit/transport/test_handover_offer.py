"""Offers of memory: only who has the secret makes one, and a trainer has its tensors back when it says so."""

import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.transport.offer import (
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    offer_with,
    seal,
    unseal,
)
from refitd_client.transport.offer_file import ExportedTensors, HandoverKeyRefusedError, make_secret, read_secret
from support.exporting import imported

SECRET = b"s" * 32
HOST = OfferedTensor("w", "BF16", (2, 3), HostPlace("/shm/x", 64))
DEVICE = OfferedTensor("v", "F32", (4,), DevicePlace("GPU-1", b"h" * 64, 3, 0))


def offer(version: str = "run~v000001", numbers: tuple[int, ...] = (0, 2**64 - 1), **facts: Any) -> Offer:
    known: dict[str, Any] = {"host": "a", "boot": "b", "pid": 1, "life": "c", "tensors": (HOST, DEVICE)}
    return offer_with(OfferLayout(**(known | facts)), version, numbers)


def test_what_was_offered_is_what_is_read() -> None:
    assert unseal(seal(offer(), SECRET), SECRET) == offer()
    assert offer().expected == {"w": "0" * 16, "v": "f" * 16}
    assert (HOST.nbytes, DEVICE.nbytes) == (12, 16)


def test_a_layout_that_is_known_is_the_same_object_and_one_that_moved_is_not() -> None:
    known = unseal(seal(offer(), SECRET), SECRET)
    again = unseal(seal(offer("run~v000002", (3, 4)), SECRET), SECRET, known)
    assert again.layout is known.layout
    assert (again.version, again.fingerprints) == ("run~v000002", (3, 4))
    for moved in ({"life": "d"}, {"tensors": (HOST, msgspec.structs.replace(DEVICE, shape=(2, 2)))}):
        other = unseal(seal(offer(**moved), SECRET), SECRET, known)
        assert other == offer(**moved)


def test_an_offer_under_another_secret_is_not_even_parsed() -> None:
    with pytest.raises(OfferRefusedError, match="not made with this root's secret"):
        unseal(seal(offer(), b"t" * 32), SECRET)


SEALED = seal(offer(), SECRET)


@given(at=st.integers(0, len(SEALED) - 1), bit=st.integers(0, 7))
def test_no_bit_of_it_can_be_changed(at: int, bit: int) -> None:
    changed = bytearray(SEALED)
    changed[at] ^= 1 << bit
    with pytest.raises(OfferRefusedError):
        unseal(bytes(changed), SECRET)


@given(st.binary(max_size=300))
def test_anything_else_is_no_offer(data: bytes) -> None:
    with pytest.raises(OfferRefusedError):
        unseal(data, SECRET)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"format": 1}, "format 1"),
        ({"version": "../../etc"}, "which is no version"),
        ({"numbers": (1,)}, "one fingerprint for each tensor"),
        ({"tensors": (HOST, HOST)}, "names a tensor twice"),
        ({"tensors": (msgspec.structs.replace(HOST, dtype="BF17"),)}, "dtype 'BF17' is unknown"),
        ({"tensors": (msgspec.structs.replace(HOST, shape=(-1, 3)),)}, "negative"),
        ({"tensors": (msgspec.structs.replace(HOST, place=HostPlace("/shm/x", -8)),)}, "negative"),
        ({"tensors": (msgspec.structs.replace(DEVICE, place=DevicePlace("G", b"h", 3, 0)),)}, "has not 64 bytes"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused_whoever_made_it(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(OfferRefusedError, match=reason):
        unseal(seal(offer(**facts), SECRET), SECRET)


def test_a_trainer_has_its_tensors_back_when_the_last_reader_is_done(tmp_path: Path) -> None:
    exported = ExportedTensors(tmp_path, offer(), SECRET)
    with imported(exported.path, SECRET) as first:
        with imported(exported.path, SECRET) as second:
            assert first.offer == second.offer == offer()
            assert first.is_exported
            assert not exported.take_back(0.0)
            assert not first.is_exported  # what it copies from now on may be anything
        assert not exported.take_back(0.0)
    assert exported.take_back(0.0)
    assert exported.take_back(0.0)
    assert [path.name for path in tmp_path.iterdir()] == [".lender.lock"]


def test_a_trainer_waits_for_a_reader_no_longer_than_it_reads(tmp_path: Path) -> None:
    exported = ExportedTensors(tmp_path, offer(), SECRET)
    reading, done = threading.Event(), threading.Event()

    def read() -> None:
        with imported(exported.path, SECRET):
            reading.set()
            done.wait(30)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(30)
    threading.Timer(0.05, done.set).start()
    assert exported.take_back(30.0)
    assert done.is_set()
    thread.join()


def test_an_offer_that_was_taken_back_cannot_be_read_any_more_under_whatever_name(tmp_path: Path) -> None:
    exported = ExportedTensors(tmp_path, offer(), SECRET)
    kept = tmp_path / "kept"
    kept.hardlink_to(exported.path)
    with imported(kept, SECRET) as found:
        exported.take_back(0.0)
        assert not found.is_exported
    assert exported.take_back(0.0)
    with pytest.raises(OfferRefusedError), imported(kept, SECRET):
        pass


def test_while_a_trainer_takes_it_back_nobody_begins_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = ExportedTensors(tmp_path, offer(), SECRET)
    flock = fcntl.flock

    def later(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:  # the engine has opened it: now the trainer wants it back
            assert exported.take_back(0.0)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", later)
    with pytest.raises(OfferRefusedError, match="withdrawn"), imported(exported.path, SECRET):
        pass


READER = """
import sys
from pathlib import Path
from refitd_client.transport.offer_file import ImportedTensors
found = ImportedTensors(Path(sys.argv[1]), b"s" * 32)
found.hold()
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_reader_that_is_killed_holds_up_nobody(tmp_path: Path) -> None:
    exported = ExportedTensors(tmp_path, offer(), SECRET)
    command = [sys.executable, "-c", READER, str(exported.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        assert not exported.take_back(0.0)
        reader.kill()
        assert exported.take_back(30.0)


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_what_is_no_plain_file_is_no_offer_and_nothing_hangs(tmp_path: Path, what: str) -> None:
    path = tmp_path / ".offer-x"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises((OfferRefusedError, OSError)), imported(path, SECRET):
        pass


def test_a_root_has_one_secret_that_its_group_may_read(tmp_path: Path) -> None:
    (tmp_path / ".refitd").mkdir()
    make_secret(tmp_path)
    secret = read_secret(tmp_path)
    make_secret(tmp_path)
    assert read_secret(tmp_path) == secret
    assert len(secret) == 32
    assert stat.S_IMODE((tmp_path / ".refitd" / "handover.key").stat().st_mode) == 0o640
    assert [path.name for path in (tmp_path / ".refitd").iterdir()] == ["handover.key"]


@pytest.mark.parametrize(("mode", "data", "reason"), [(0o644, b"s" * 32, "chmod o="), (0o640, b"s", "32 bytes")])
def test_a_secret_that_is_none_is_named(tmp_path: Path, mode: int, data: bytes, reason: str) -> None:
    path = tmp_path / ".refitd" / "handover.key"
    path.parent.mkdir()
    path.write_bytes(data)
    path.chmod(mode)
    with pytest.raises(HandoverKeyRefusedError, match=reason):
        read_secret(tmp_path)
