"""Server-sent events, read as they come and resumed where the stream broke off. Pure: bytes in, events out.

The format is WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines `field: value`, an empty
line ends an event, `id` is what `Last-Event-ID` takes on the next connection, `retry` is a pause in milliseconds.
The data of each event is one `Event` in JSON. Two reasons against a library: httpx's own
lines also end at characters such as U+2028 that JSON may hold, and httpx-sse (0.4.3) keeps an event of any length in
memory, while this reader refuses one above `MAX_EVENT_BYTES`.
"""

import re
from collections.abc import Iterator

import msgspec

from refitd_client.contract.wire import Event
from refitd_client.errors import ServiceUnreachableError
from refitd_client.http import routes
from refitd_client.http.retry import HttpReply, LostReply, RetryPolicy

MAX_EVENT_BYTES = 2**20
# The service sends a comment every few seconds: a stream that is silent for this long is dead.
SILENCE = 60.0

_LINE_END = re.compile(rb"\r\n|\n|\r")


class BadStreamError(ServiceUnreachableError):
    """What came is not refitd's event stream."""


class EventReader:
    """Reads one stream over any number of connections.

    `last_event_id` is what the next connection resumes after, `pause` how many seconds the service asks to wait before
    that connection.
    """

    def __init__(self, url: str, last_event_id: str | None = None) -> None:
        self._url = url
        self.last_event_id = last_event_id
        self.pause = 0.0
        self.start()

    def start(self) -> None:
        """Begin a connection: drop the half of an event that the one before left behind."""
        self._rest = b""
        self._data: list[bytes] = []
        self._id = self.last_event_id

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request that (re)opens the stream."""
        resume = {} if self.last_event_id is None else {"Last-Event-ID": self.last_event_id}
        return {"Accept": "text/event-stream", "Cache-Control": "no-store", **resume}

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Yield the events that end in this chunk. `last_event_id` moves as each is yielded, and not before.

        Raises:
            BadStreamError: an event is not in refitd's form, or longer than `MAX_EVENT_BYTES`.
        """
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        if chunk.endswith(b"\r"):  # half of \r\n, or a whole line end: the next byte decides
            self._rest = lines.pop() + b"\r"
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise BadStreamError(f"{self._url} sends an event longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line:
                self._take(line)
            elif (event := self._end()) is not None:
                yield event

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"id" if b"\0" not in value:
                self._id = value.decode("ascii", "ignore") or None
            case b"retry" if value.isdigit():
                self.pause = min(int(value[:9]) / 1000, 60.0)
            case _:
                pass  # comments and unknown fields are ignored, as the format asks

    def _end(self) -> Event | None:
        data, self._data = b"\n".join(self._data), []
        self.last_event_id = self._id
        if not data:
            return None
        try:
            return msgspec.json.decode(data, type=Event)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BadStreamError(
                f"{self._url} sends an event in a form that this client does not know: {error}"
            ) from error


class StreamRetry:
    """Decides when to open a broken stream again. Only time without a stream counts against the deadline."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._since = now
        self._tried = 0
        self._opened = False

    def opened(self) -> None:
        """Note that a stream has begun."""
        self._opened = True

    def pause(self, outcome: HttpReply | LostReply, now: float, chance: float) -> float | None:
        """The pause before the next connection, in seconds; None to give up.

        Args:
            outcome: how the last connection ended.
            now: the monotonic clock, in seconds.
            chance: random, in [0, 1), for the jitter.
        """
        if self._opened:
            self._tried, self._since, self._opened = 0, now, False
        self._tried += 1
        elapsed = now - self._since
        return self._policy.pause(routes.events(), outcome, tried=self._tried, elapsed=elapsed, chance=chance)
