"""What a server that is no service, or a hostile one, can take of a client: a bounded time, and bounded memory."""

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import msgspec
import pytest

from refitd_client import RefitClient
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.wire import WaitResult
from refitd_client.errors import ServiceProblemError, ServiceUnreachableError
from refitd_client.http import connection
from refitd_client.http.exchange import RetryPolicy
from support.endless_server import CHUNK, CHUNKED, OK, answering
from support.scripted_server import Step, answer, problem, serve
from support.stand_in_service import make_version

ONCE = RetryPolicy(deadline=0.0)
PATIENCE = 30.0

Ask = Callable[[str, float], None]


def overview(url: str, timeout: float) -> None:
    with RefitClient(url, timeout=timeout, retry=ONCE) as client:
        client.overview()


def events(url: str, timeout: float) -> None:
    with RefitClient(url, timeout=timeout, retry=ONCE) as client:
        next(client.events())


ALL = pytest.mark.parametrize("ask", [overview, events])


@ALL
@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (CHUNKED, b"1\r\n1\r\n")],
    ids=["head", "continue", "body"],
)
def test_an_exchange_has_one_deadline_however_often_a_byte_comes(ask: Ask, begin: bytes, more: bytes) -> None:
    with answering(begin, more, pause=0.02) as url, pytest.raises(ServiceUnreachableError, match="in whole"):
        ask(url, 0.2)


@ALL
def test_a_body_without_end_is_read_no_further_than_its_route_may_have(ask: Ask) -> None:
    with answering(CHUNKED, CHUNK) as url, pytest.raises(ServiceUnreachableError, match="more than"):
        ask(url, PATIENCE)


@ALL
def test_a_body_in_pieces_without_end_is_read_no_further(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_PIECES", 100)
    with answering(CHUNKED, b"1\r\n1\r\n" * 50) as url, pytest.raises(ServiceUnreachableError, match="too many pieces"):
        ask(url, PATIENCE)


@ALL
def test_a_compressed_body_which_was_not_asked_for_is_not_read(ask: Ask) -> None:
    with (
        answering(OK + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n", b"") as url,
        pytest.raises(ServiceUnreachableError, match="compressed"),
    ):
        ask(url, PATIENCE)


BUSY = problem(503, "too-many", "64 requests wait for news", Retry_After="1")


def ended(outcome: WaitOutcome) -> Step:
    return answer(200, msgspec.to_builtins(WaitResult(outcome=outcome, version=make_version(1))))


def full(handler: BaseHTTPRequestHandler) -> None:
    """Has no place for a request that waits, and answers what it knows."""
    (ended(WaitOutcome.PENDING) if handler.path.endswith("timeout=0.000") else BUSY)(handler)


def test_a_wait_that_gets_no_place_till_its_end_is_pending_as_any_other() -> None:
    with serve(full) as server, RefitClient(server.url) as client:
        assert client.wait("exp~v000001", timeout=0.5).outcome is WaitOutcome.PENDING


def test_a_wait_that_gets_a_place_later_is_one() -> None:
    with serve(BUSY, ended(WaitOutcome.SERVED)) as server, RefitClient(server.url) as client:
        assert client.wait("exp~v000001", timeout=PATIENCE).outcome is WaitOutcome.SERVED
    assert len(server.seen) == 2


def test_a_service_that_takes_no_request_at_all_is_an_error() -> None:
    with serve(BUSY) as server, RefitClient(server.url) as client, pytest.raises(ServiceProblemError, match="too-many"):
        client.wait("exp~v000001", timeout=0.5)
