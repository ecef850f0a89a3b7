"""How one call follows its requests: it is told which have changed, and looks when it has time."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from refitd_embedded.request import Request
from refitd_embedded.rwlock import Changes


@dataclass(slots=True)
class Progress:
    """The requests of one call."""

    requests: Sequence[Request]
    _changed: list[Request] = field(default_factory=list[Request])
    _changes: Changes = field(default_factory=Changes)

    def note(self, request: Request) -> None:
        """`request` has changed."""
        if request not in self._changed:
            self._changed.append(request)
        self._changes.tell()

    async def done(self) -> None:
        """Wait for all to end."""
        await self._changes.until(lambda: all(request.finish for request in self.requests))

    async def __aiter__(self) -> AsyncIterator[Request]:
        """Each change, until all have ended. Changes that nobody fetched in time come as one."""
        unfinished = len(self.requests)
        while unfinished:
            await self._changes.until(lambda: bool(self._changed))
            request = self._changed.pop(0)
            unfinished -= request.finish is not None
            yield request
