"""A message between ranks as bytes. Large arrays go beside it, as they lie in memory: pickling would copy them."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

_LARGE = 2**16  # bytes of an array from which on a part of its own costs less than a copy


class RankMessages:
    """Sends and receives over a group. `ranks` are the global numbers of its ranks."""

    def __init__(self, torch: Any, distributed: Any, group: Any, ranks: Sequence[int]) -> None:
        self._torch, self._distributed, self._group, self._ranks = torch, distributed, group, ranks

    def send(self, message: Any, to: int, timeout: float) -> None:
        """Send a message. Returns when the rank has received it: two that send to each other wait for ever.

        Raises:
            RuntimeError: the rank is gone, or does not listen within the seconds.
        """
        body, *beside = parts_of(message)
        tensors = [self._torch.tensor([len(body), len(beside)], dtype=self._torch.int64), self._bytes(body)]
        if beside:
            tensors.append(self._torch.tensor([memoryview(part).nbytes for part in beside], dtype=self._torch.int64))
            tensors += map(self._bytes, beside)
        for tensor in tensors:
            work = self._distributed.isend(tensor, dst=self._ranks[to], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))

    def expect(self, source: int) -> tuple[Any, Any]:
        """Begin to receive a message."""
        numbers = self._torch.zeros(2, dtype=self._torch.int64)
        return numbers, self._distributed.irecv(numbers, src=self._ranks[source], group=self._group)

    def receive(self, expected: tuple[Any, Any], source: int, timeout: float) -> Any:
        """The message of an `expect`.

        Raises:
            RuntimeError: the rank is gone, or sends nothing within the seconds.
        """
        numbers, work = expected
        work.wait(timedelta(seconds=timeout))

        def arrived(count: int, kind: Any) -> Any:
            body = self._torch.empty(count, dtype=kind)
            work = self._distributed.irecv(body, src=self._ranks[source], group=self._group)
            work.wait(timedelta(seconds=max(timeout, 1.0)))
            return body.numpy()

        length, beside = cast("list[int]", numbers.tolist())
        parts = [arrived(length, self._torch.uint8).data]
        lengths: list[int] = arrived(beside, self._torch.int64).tolist() if beside else []
        return message_of(parts + [arrived(each, self._torch.uint8).data for each in lengths])

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
