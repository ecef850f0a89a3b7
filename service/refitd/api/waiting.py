"""Requests that wait for news: long polls and event streams. Each holds a connection for as long as its client likes.

They are counted together: in all, from one peer, and by one client. A peer has more connections than may wait, so that
those who share its address can always ask for something, and a client with a token has places that one without cannot
take. Beyond the count the answer is 503 with Retry-After, after which clients ask again.
"""

from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request

from refitd.api.auth import KNOWN_BY
from refitd.api.connection import peer_of
from refitd.problem import ProblemError, Slug


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSlots:
    """How many requests may wait: in all, from one peer, and by one client of a peer (`ConnectionSlots` are more)."""

    all: int = 256
    peer: int = 96
    client: int = 64


class WaitingRequests:
    """Counts the requests that wait."""

    def __init__(self) -> None:
        self.slots = WaitSlots()
        self._held: list[tuple[str, bytes]] = []

    @property
    def count(self) -> int:
        """How many wait now."""
        return len(self._held)

    @contextmanager
    def slot(self, request: Request) -> Generator[None]:
        """Hold one of the places. The client is the token that the request came with, else its peer.

        Raises:
            ProblemError: all that it may have are taken.
        """
        peer = peer_of(None if request.client is None else (request.client.host, request.client.port))
        client = (peer, request.scope.get(KNOWN_BY, b""))
        own = sum(each == client for each in self._held)
        neighbours = sum(each[0] == peer for each in self._held)
        if own >= self.slots.client or neighbours >= self.slots.peer or self.count >= self.slots.all:
            detail = (
                f"{self.count} requests wait for news, {own} of them this client's, and the service takes no more: "
                "close one, or ask again"
            )
            raise ProblemError(Slug.TOO_MANY, detail, {"Retry-After": "1"})
        self._held.append(client)
        try:
            yield
        finally:
            self._held.remove(client)


async def stream_slot(request: Request) -> AsyncGenerator[None]:
    """Hold one of the places as long as the request lasts.

    Raises:
        ProblemError: as `WaitingRequests.slot`.
    """
    waiting: WaitingRequests = request.app.state.waiting
    with waiting.slot(request):
        yield
