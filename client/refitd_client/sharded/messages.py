"""A message between ranks as bytes. Large arrays go beside it, as they lie in memory: pickling would copy them.

Rank 0 gets those of a rank on its host through memory that both see, the others over the group's sockets.
"""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from refitd_client.sharded.rank_memory import FileOfRank, MemoryProbe, SeenMemory, SentMemory

_LARGE = 2**16  # bytes of an array from which on a part of its own costs less than a copy
_BY_MEMORY = 2**20  # bytes from which on memory costs less than sockets


class UnreadableMessageError(Exception):
    """A message has come, and its arrays are in memory that cannot be opened. The next one may be readable."""


class RankMessages:
    """Sends and receives over a group. `ranks` are the global numbers of its ranks."""

    def __init__(self, torch: Any, distributed: Any, group: Any, ranks: Sequence[int]) -> None:
        self._torch, self._distributed, self._group, self._ranks = torch, distributed, group, ranks
        self._sent = SentMemory()
        self._is_seen = False  # by rank 0
        self._seen: dict[int, SeenMemory] = {}

    def probe(self) -> MemoryProbe | None:
        """Something in this rank's memory for rank 0 to find; None where it cannot be."""
        return self._sent.probe()

    def sees(self, source: int, probe: MemoryProbe | None) -> bool:
        """Whether a rank's memory can be opened here: rank 0 tries, and tells the rank."""
        if probe is None or (seen := SeenMemory.found(probe)) is None:
            return False
        self._seen[source] = seen
        return True

    def is_seen(self) -> None:
        """Rank 0 sees this rank's memory: large arrays go there."""
        self._is_seen = True

    def close(self) -> None:
        """Free the memory."""
        self._sent.close()
        self._seen = {}

    def send(self, message: Any, to: int, timeout: float) -> None:
        """Send a message. Returns when the rank has received it: two that send to each other wait for ever.

        Raises:
            RuntimeError: the rank is gone, or does not listen within the seconds.
        """
        body, *beside = parts_of(message)
        file = self._in_memory(beside) if to == 0 and self._is_seen else None
        numbers = [len(body), len(beside), *((-1, 0) if file is None else (file.descriptor, file.name))]
        tensors = [self._torch.tensor(numbers, dtype=self._torch.int64), self._bytes(body)]
        if beside:
            tensors.append(self._torch.tensor([memoryview(part).nbytes for part in beside], dtype=self._torch.int64))
        if file is None:
            tensors += map(self._bytes, beside)
        for tensor in tensors:
            work = self._distributed.isend(tensor, dst=self._ranks[to], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))

    def expect(self, source: int) -> tuple[Any, Any]:
        """Begin to receive a message."""
        numbers = self._torch.zeros(4, dtype=self._torch.int64)
        return numbers, self._distributed.irecv(numbers, src=self._ranks[source], group=self._group)

    def receive(self, expected: tuple[Any, Any], source: int, timeout: float) -> Any:
        """The message of an `expect`.

        Raises:
            UnreadableMessageError: it has come, and what goes with it cannot be read here.
            RuntimeError: the rank is gone, or sends nothing within the seconds.
        """
        numbers, work = expected
        work.wait(timedelta(seconds=timeout))

        def arrived(count: int, kind: Any) -> Any:
            body = self._torch.empty(count, dtype=kind)
            work = self._distributed.irecv(body, src=self._ranks[source], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))
            return body.numpy()

        length, beside, descriptor, name = cast("list[int]", numbers.tolist())
        parts = [arrived(length, self._torch.uint8).data]
        lengths: list[int] = arrived(beside, self._torch.int64).tolist() if beside else []
        if descriptor < 0:
            parts += [arrived(each, self._torch.uint8).data for each in lengths]
            return message_of(parts)
        try:
            parts += self._seen[source].parts(FileOfRank(descriptor=descriptor, name=name), lengths)
        except (OSError, ValueError) as error:
            raise UnreadableMessageError(str(error)) from error
        return message_of(parts)

    def _in_memory(self, parts: Sequence[Any]) -> FileOfRank | None:
        """The file with large parts; None where sockets are as good, or there is too little memory."""
        views = [memoryview(part).cast("B") for part in parts]
        if sum(map(len, views)) < _BY_MEMORY:
            return None
        try:
            return self._sent.put(views)
        except OSError:
            return None

    def _bytes(self, part: Any) -> Any:
        return self._torch.frombuffer(part, dtype=self._torch.uint8)


def parts_of(message: Any) -> list[Any]:
    """The message, and after it the bytes of its large arrays, as buffers that can be written to."""
    beside: list[Any] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _LARGE:
            return True
        beside.append(bytearray(raw) if raw.readonly else raw)  # torch warns of what cannot be written to
        return False

    return [bytearray(pickle.dumps(message, protocol=5, buffer_callback=stays)), *beside]


def message_of(parts: Sequence[Any]) -> Any:
    """The message of its parts, whose memory its arrays use."""
    message, *beside = parts
    return pickle.loads(message, buffers=beside)  # noqa: S301 from a rank of the same job, as torch's own collectives do
