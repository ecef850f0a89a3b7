"""The event stream: read from any cut of the bytes, resumed after any break, without loss and without repeats."""

import time
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from refitd_client.contract.wire import Event
from refitd_client.errors import ServiceError, ServiceUnreachableError, UnauthorizedError
from refitd_client.http import client as client_module
from refitd_client.http.client import MAX_EVENT_BYTES, BadStreamError, EventReader, RefitClient
from refitd_client.http.exchange import RetryPolicy
from support.quick_client import QUICK
from support.scripted_server import answer, hang_up, page, problem, serve, stream


def event(seq: int, text: str = "sealed") -> Event:
    return Event(seq=seq, at="2026-11-21T12:00:00Z", kind="version", subject="exp~v000007", text=text)


def frame(shown: Event, end: str = "\n") -> bytes:
    data = msgspec.json.encode(shown).decode()
    return f"data: {data}{end}event: {shown.kind}{end}id: {shown.seq}{end}{end}".encode()


def take(url: str, count: int, last_event_id: str | None = None, **options: Any) -> list[Event]:
    with RefitClient(url, **{"retry": QUICK, **options}) as client, closing(client.events(last_event_id)) as events:
        return list(islice(events, count))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_the_same_wherever_the_network_cuts_them(end: str) -> None:
    sent = [event(1), event(2, "line\u2028separator, \x85 and ü"), event(3)]
    content = b": hello" + end.encode() * 2 + b"".join(frame(shown, end) for shown in sent) + b":"
    for cut in range(len(content)):
        reader = EventReader("http://service")
        assert [*reader.feed(content[:cut]), *reader.feed(content[cut:])] == sent
        assert reader.last_event_id == "3"


def test_several_data_lines_are_one_event_and_unknown_fields_are_ignored() -> None:
    content = b'data: {"seq":1,"at":"t",\r\ndata:"kind":"k","subject":"s","text":"x"}\r\nnovel: 1\r\nid\r\n\r\n'
    for cut in range(len(content)):
        reader = EventReader("http://service")
        assert [shown.seq for part in (content[:cut], content[cut:]) for shown in reader.feed(part)] == [1]


def test_half_an_event_is_forgotten_when_the_connection_breaks() -> None:
    reader = EventReader("http://service")
    assert list(reader.feed(frame(event(1)) + b'id: 2\ndata: {"seq":2,')) == [event(1)]
    reader.start()
    assert reader.headers["Last-Event-ID"] == "1"
    assert list(reader.feed(frame(event(2)))) == [event(2)]


@pytest.mark.parametrize(
    "content", [b"data: {}\n\n", b"data: <html>\n\n", b"data: \xff\n\n", b"x" * (MAX_EVENT_BYTES + 1)]
)
def test_what_is_no_event_is_named_with_its_url(content: bytes) -> None:
    with pytest.raises(BadStreamError, match="http://service sends an event"):
        list(EventReader("http://service").feed(content))


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    reader = EventReader("http://service")
    for _ in range(MAX_EVENT_BYTES // 1000):
        list(reader.feed(b"data: " + b"x" * 1000 + b"\n"))
    with pytest.raises(BadStreamError, match="longer than"):
        list(reader.feed(b"data: " + b"x" * 1000))


def test_time_with_a_stream_does_not_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    retry = RetryPolicy(deadline=0.5, first_pause=0.001)
    with (
        serve(stream(frame(event(1))), stream(frame(event(2))), hang_up) as server,
        RefitClient(server.url, retry=retry) as client,
        closing(client.events()) as events,
    ):
        for seq in (1, 2):
            assert next(events) == event(seq)
            now[0] += 3600.0


def test_a_broken_stream_is_resumed_where_it_broke_off() -> None:
    torn = frame(event(2)) + frame(event(3))[:-5]
    with serve(stream(frame(event(1))), hang_up, page(502), stream(torn), stream(frame(event(3)))) as server:
        assert take(server.url, 3) == [event(1), event(2), event(3)]
    assert [seen.headers.get("last-event-id") for seen in server.seen] == [None, "1", "1", "1", "2"]
    assert {seen.headers["accept"] for seen in server.seen} == {"text/event-stream"}


def test_it_resumes_where_the_caller_says() -> None:
    with serve(stream(frame(event(8)))) as server:
        assert take(server.url, 1, "7") == [event(8)]
    assert server.seen[0].headers["last-event-id"] == "7"


def test_a_service_that_wants_no_reader_ends_the_iteration() -> None:
    with serve(stream(frame(event(1))), answer(204, b"")) as server:
        assert take(server.url, 5) == [event(1)]


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (problem(401, "unauthorized"), UnauthorizedError, "unauthorized"),
        (page(200), ServiceUnreachableError, "/v1/events answered HTTP 200, but not as refitd does: text/html"),
        (stream(b"data: {}\n\n"), ServiceUnreachableError, "a form that this client does not know"),
    ],
)
def test_what_will_not_get_better_ends_it_at_once(step: Any, error: type[ServiceError], words: str) -> None:
    with serve(step) as server:
        with pytest.raises(error, match=words):
            take(server.url, 1)
        assert len(server.seen) == 1


def test_a_service_that_stays_away_ends_it_at_the_deadline() -> None:
    with serve(hang_up) as server:
        with pytest.raises(ServiceUnreachableError, match=r"GET .*/v1/events got no answer"):
            take(server.url, 1, retry=RetryPolicy(deadline=0.5, first_pause=0.001))
        assert len(server.seen) > 1


def test_an_id_that_is_no_header_is_not_sent_on() -> None:
    with serve(
        stream(frame(event(1)).replace(b"id: 1", "id: bad\u00fc\r\nid: 1\0".encode())), stream(frame(event(2)))
    ) as server:
        assert take(server.url, 2) == [event(1), event(2)]
    assert server.seen[1].headers.get("last-event-id") == "bad"
