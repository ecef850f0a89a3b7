"""What a rank sends through memory is what its receiver has, as long as it has any of it."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from refitd_client.sharded.rank_memory import MemoryProbe, SeenMemory, SentMemory

LARGE = 9 * 2**20


def sent_and_seen() -> tuple[SentMemory, SeenMemory]:
    sent = SentMemory()
    probe = sent.probe()
    assert probe is not None
    seen = SeenMemory.found(probe)
    assert seen is not None
    return sent, seen


def through(sent: SentMemory, seen: SeenMemory, *arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays as a message brings them."""
    file = sent.put([each.data.cast("B") for each in arrays])
    parts = seen.parts(file, [each.nbytes for each in arrays])
    return [np.frombuffer(part, each.dtype) for part, each in zip(parts, arrays, strict=True)]


def test_arrays_arrive_as_they_were_and_in_the_file_of_before_when_that_is_free() -> None:
    sent, seen = sent_and_seen()
    names = set()
    for seed in range(4):
        arrays = [np.random.default_rng(seed).integers(0, 99, LARGE // 8), np.arange(seed + 3, dtype=np.uint16)]
        found = through(sent, seen, *arrays)
        assert all(np.array_equal(one, other) for one, other in zip(found, arrays, strict=True))
        names.add(seen._name)
        del found
    assert len(names) == 1
    sent.close()


def test_an_array_that_is_kept_stays_what_it_is() -> None:
    """Also a slice of one that came in a pickled message. The sender takes another file meanwhile."""
    sent, seen = sent_and_seen()
    beside: list[memoryview] = []
    array = np.arange(50_000, dtype=np.uint32)
    message = pickle.dumps([array], protocol=5, buffer_callback=lambda each: beside.append(each.raw()))
    parts = seen.parts(sent.put(beside), [len(each) for each in beside])
    (found,) = pickle.loads(message, buffers=parts)  # noqa: S301 our own bytes
    kept = found[100:200]
    del found, parts
    through(sent, seen, np.zeros(50_000, np.uint32))
    assert kept.tolist() == list(range(100, 200))
    name = seen._name
    del kept
    through(sent, seen, np.zeros(50_000, np.uint32))
    assert seen._name == name
    sent.close()


def test_what_is_larger_than_the_file_comes_in_another_one() -> None:
    sent, seen = sent_and_seen()
    for size in (10, 10**6, 10):
        (found,) = through(sent, seen, np.full(size, 7, np.uint8))
        assert (len(found), int(found.min())) == (size, 7)
    sent.close()


def test_the_memory_of_another_process_is_seen_and_its_end_leaves_nothing() -> None:
    code = (
        "import pickle, sys; from refitd_client.sharded.rank_memory import SentMemory; sent = SentMemory();"
        "sys.stdout.buffer.write(pickle.dumps(sent.probe())); sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    probe = pickle.load(child.stdout)  # noqa: S301 our own bytes
    assert SeenMemory.found(probe) is not None
    child.stdin.close()
    child.stdout.close()
    child.wait(30)
    assert SeenMemory.found(probe) is None


@pytest.mark.parametrize(
    "what", ["another machine", "another word", "another file", "no process", "no memory of the kind"]
)
def test_what_is_not_the_ranks_memory_is_not_taken_for_it(what: str) -> None:
    """A process of that number in another container has other files, or none."""
    sent = SentMemory()
    probe = sent.probe()
    assert probe is not None
    plain = os.memfd_create("plain")
    wrong: dict[str, MemoryProbe] = {
        "another machine": replace(probe, boot="other"),
        "another word": replace(probe, word=bytes(16)),
        "another file": replace(probe, file=replace(probe.file, name=probe.file.name + 1)),
        "no process": replace(probe, pid=2**22 + 1),
        "no memory of the kind": replace(probe, file=replace(probe.file, descriptor=plain)),
    }
    assert SeenMemory.found(wrong[what]) is None
    os.close(plain)
    sent.close()
