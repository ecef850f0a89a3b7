"""Memory that two ranks of one host both see, for what they send each other: sockets take 28 ms for 46 MB.

The sender puts the bytes into a file without a name (memfd_create(2)), and the receiver opens it through the sender's
process (/proc/PID/fd/N, proc(5)). So nothing is left behind, whichever of the two dies. Whether a receiver can do that,
as it cannot from another host or container, is tried when a publisher is opened.

To get pages from the kernel takes as long as the sockets. So both keep a file, and it is written again when the
receiver has no array in it any more: it says so in the file's first bytes. Until then the sender takes another file.
"""

import ctypes
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refitd_client.files.linux_calls import memory_file
from refitd_client.files.plain_file import open_plain
from refitd_client.lanes import in_lanes, lanes_for
from refitd_client.transport.ipc.shared import boot_id

_COPY_PIECE = 2**22  # bytes that a thread copies at a time
_HEAD_BYTES = 64  # bytes: the file's name, how many messages were put into it, and how many of these were freed
_NUMBER_OF, _PUT, _FREED = range(3)
_MESSAGE_NAME = "refitd-message"  # in /proc


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOfRank:
    """A file in a rank's process: its descriptor there, and a number that no other one has."""

    descriptor: int
    name: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """A word in the memory of a process, to be found by the one that is to open it. `boot` is that of its machine, and
    `processes` says which other ones see it by the number `pid`.
    """

    boot: str
    processes: str
    pid: int
    file: FileOfRank
    word: bytes


class SentMemory:
    """The file of a rank that sends."""

    def __init__(self) -> None:
        self._file: FileOfRank | None = None
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def probe(self) -> MemoryProbe | None:
        """A word to be found; None where there is no such memory."""
        word = os.urandom(16)
        try:
            file = self.put([memoryview(word)])
            return MemoryProbe(boot=boot_id(), processes=_processes(), pid=os.getpid(), file=file, word=word)
        except OSError:
            return None

    def put(self, parts: Sequence[memoryview]) -> FileOfRank:
        """Put some bytes into the file, or into a new one.

        Raises:
            OSError: there is no such memory.
        """
        begins = list(accumulate((len(part) for part in parts), initial=_HEAD_BYTES))
        file = self._file
        if file is None or begins[-1] > len(self._memory) or not self._is_free:
            file = self._make(begins[-1])

        def copy(begin: int, part: memoryview, at: int, _: Event) -> None:
            some = np.frombuffer(part[at : at + _COPY_PIECE], np.uint8)
            self._memory[begin + at : begin + at + len(some)] = some

        jobs = [
            partial(copy, begin, part, at)
            for begin, part in zip(begins, parts, strict=False)
            for at in range(0, len(part), _COPY_PIECE)
        ]
        in_lanes(jobs, lanes=lanes_for(len(jobs)))
        _numbers(self._memory)[_PUT] += 1
        return file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file.descriptor)
            self._file, self._memory = None, np.empty(0, np.uint8)

    @property
    def _is_free(self) -> bool:
        numbers = _numbers(self._memory)
        return bool(numbers[_PUT] == numbers[_FREED])

    def _make(self, size: int) -> FileOfRank:
        self.close()  # a receiver has it mapped as long as it needs it
        descriptor, name = memory_file(_MESSAGE_NAME), secrets.randbits(62)
        self._file = FileOfRank(descriptor=descriptor, name=name)
        size += size // 8  # the next message is about as long; pages that are not written take nothing
        os.ftruncate(descriptor, size)
        self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        _numbers(self._memory)[_NUMBER_OF] = name
        return self._file


class SeenMemory:
    """The file of another rank, as its receiver has it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._name = -1
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    @classmethod
    def found(cls, probe: MemoryProbe) -> "SeenMemory | None":
        """None where this process does not find the word. A process of another machine or container is not looked for:
        its number is somebody else's here.
        """
        seen = cls(probe.pid)
        try:
            if (probe.boot, probe.processes) != (boot_id(), _processes()):
                return None
            (word,) = seen.parts(probe.file, [len(probe.word)])
        except (OSError, ValueError):
            return None
        return seen if bytes(word) == probe.word else None

    def parts(self, file: FileOfRank, lengths: Sequence[int]) -> list[memoryview]:
        """What was put into a file. The sender may write it again when nothing refers to any of it.

        Args:
            file: the file.
            lengths: of the parts, in bytes.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is another file.
        """
        if file.name != self._name:
            self._open(file)
        begins = list(accumulate(lengths, initial=_HEAD_BYTES))
        if begins[-1] > len(self._memory):
            raise ValueError(f"process {self._pid} has put less into its file than it says")
        # Arrays keep what they were made of alive. numpy would take an array for this apart, and keep another one.
        owner = (ctypes.c_uint8 * len(self._memory)).from_buffer(self._memory.data)
        weakref.finalize(owner, _free, self._memory, os.getpid()).atexit = False
        return [memoryview(owner).cast("B")[begin:end] for begin, end in pairwise(begins)]

    def _open(self, file: FileOfRank) -> None:
        path = Path(f"/proc/{self._pid}/fd/{file.descriptor}")
        # To open and close another file would end this process's locks on it, if it has any.
        if not str(path.readlink()).startswith(f"/memfd:{_MESSAGE_NAME}"):
            raise ValueError(f"process {self._pid} has another file as {file.descriptor}")
        descriptor = open_plain(path, os.O_RDWR, follow=True)
        try:
            if (size := os.fstat(descriptor).st_size) < _HEAD_BYTES:
                raise ValueError(f"process {self._pid} has another file as {file.descriptor}")
            memory: Any = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)
        if _numbers(memory)[_NUMBER_OF] != file.name:
            raise ValueError(f"process {self._pid} has another file as {file.descriptor}")
        self._name, self._memory = file.name, memory


def _free(memory: NDArray[np.uint8], pid: int) -> None:
    """Let the sender write again. A forked child has the same memory, and its parent may still have arrays in it."""
    if os.getpid() == pid:
        _numbers(memory)[_FREED] = _numbers(memory)[_PUT]


def _processes() -> str:
    """The name of the pid namespace, in which each number is one process (pid_namespaces(7))."""
    return str(Path("/proc/self/ns/pid").readlink())


def _numbers(memory: NDArray[np.uint8]) -> NDArray[np.int64]:
    return memory[:_HEAD_BYTES].view(np.int64)
