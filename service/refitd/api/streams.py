"""How many event streams there may be at a time. Each holds a connection for as long as its reader likes."""

from collections.abc import AsyncGenerator

from fastapi import Request

from refitd.problem import Kind, ProblemError

MAX_STREAMS = 64


class Streams:
    """Counts the streams that are open."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self.most = most
        self.open = 0


async def stream_slot(request: Request) -> AsyncGenerator[None]:
    """Hold one of the streams as long as the request lasts.

    Raises:
        ProblemError: all are taken.
    """
    streams: Streams = request.app.state.streams
    if streams.open >= streams.most:
        raise ProblemError(
            Kind.TOO_MANY, f"there are {streams.most} event streams already: close one", {"Retry-After": "5"}
        )
    streams.open += 1
    try:
        yield
    finally:
        streams.open -= 1
