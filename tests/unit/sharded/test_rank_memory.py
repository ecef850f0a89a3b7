"""What a rank sends through memory is what its receiver has, as long as it has any of it."""

import errno
import fcntl
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refitd_client.sharded import rank_memory
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
    "what",
    ["another machine", "another container", "another word", "another file", "no process", "no memory of the kind"],
)
def test_what_is_not_the_ranks_memory_is_not_taken_for_it(what: str) -> None:
    """A process of that number in another container has other files, or none."""
    sent = SentMemory()
    probe = sent.probe()
    assert probe is not None
    plain = os.memfd_create("plain")
    wrong: dict[str, MemoryProbe] = {
        "another machine": replace(probe, boot="other"),
        "another container": replace(probe, processes="pid:[1]"),
        "another word": replace(probe, word=bytes(16)),
        "another file": replace(probe, file=replace(probe.file, name=probe.file.name + 1)),
        "no process": replace(probe, pid=2**22 + 1),
        "no memory of the kind": replace(probe, file=replace(probe.file, descriptor=plain)),
    }
    assert SeenMemory.found(wrong[what]) is None
    os.close(plain)
    sent.close()


def test_a_file_of_this_process_that_has_the_number_keeps_its_locks(tmp_path: Path) -> None:
    """To close any descriptor of a file ends all locks that the process has on it, as those of a database."""
    sent = SentMemory()
    probe = sent.probe()
    assert probe is not None
    with (tmp_path / "locked").open("w+") as mine:
        mine.write("x" * 100)
        mine.flush()
        fcntl.lockf(mine, fcntl.LOCK_EX)
        assert SeenMemory.found(replace(probe, file=replace(probe.file, descriptor=mine.fileno()))) is None
        code = f"import fcntl; fcntl.lockf(open({str(tmp_path / 'locked')!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "Resource temporarily unavailable" in other.stderr
    sent.close()


def test_a_forked_child_that_ends_frees_nothing_of_its_parent_s() -> None:
    code = (
        "import os, sys; import numpy as np; from refitd_client.sharded.rank_memory import SeenMemory, SentMemory;"
        "sent = SentMemory(); seen = SeenMemory.found(sent.probe()); many = np.ones(10**6, np.uint8);"
        "kept = np.frombuffer(seen.parts(sent.put([memoryview(many)]), [10**6])[0], np.uint8);"
        "child = os.fork();\n"
        "if not child:\n    del kept; sys.exit()\n"
        "os.waitpid(child, 0); sent.put([memoryview(2 * many)]); print(set(kept.tolist()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "{1}\n"


def test_a_kernel_without_such_memory_leaves_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(rank_memory, "memory_file", refused)
    assert SentMemory().probe() is None
