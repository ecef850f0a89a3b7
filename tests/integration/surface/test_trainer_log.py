"""What the SDK's requests leave in the log of a trainer that shows level INFO: nothing of httpx's."""

import logging
from collections.abc import Iterator

import httpx
import pytest

from support.quick_client import run
from support.scripted_server import answer, serve

QUIET = {"httpx", "httpcore"}


@pytest.fixture
def at_info(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def of_httpx(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name.partition(".")[0] in QUIET]


def test_requests_of_the_sdk_leave_no_line_and_the_trainer_s_own_keep_theirs(at_info: pytest.LogCaptureFixture) -> None:
    with serve(answer(200, {"items": []}), answer(200, {"items": []}), answer(200, {"status": "ok"})) as server:
        run(server.url, lambda client: client.engines())
        assert of_httpx(at_info) == []
        httpx.get(f"{server.url}/healthz", trust_env=False)
        (line,) = of_httpx(at_info)
        assert "/healthz" in line
        at_info.clear()
        logging.getLogger("httpx").setLevel(logging.DEBUG)
        try:
            run(server.url, lambda client: client.healthy())
        finally:
            logging.getLogger("httpx").setLevel(logging.NOTSET)
        assert len(of_httpx(at_info)) == 1, "who asks for DEBUG gets it"
