"""A hub that is none, or a hostile one: what a host that asks it may lose of its time and memory."""

import asyncio

import pytest

from refitd.follow import hub
from refitd.follow.hub import HubUpstream
from refitd.follow.upstream import UnreachableError
from refitd_client.http.connection import Connection
from support.endless_server import CHUNK, CHUNKED, OK, answering


async def looked(url: str) -> None:
    upstream = HubUpstream(Connection(url=url))
    try:
        async with asyncio.timeout(30):
            await upstream.look(None)
    finally:
        await upstream.aclose()


async def test_an_answer_of_a_hub_without_end_is_read_no_further() -> None:
    with answering(CHUNKED, CHUNK) as url, pytest.raises(UnreachableError, match="more than"):
        await looked(url)


@pytest.mark.parametrize("begin", [OK + b"X-Slow: ", OK + b"Content-Length: 100000\r\n\r\n"], ids=["head", "body"])
async def test_an_answer_of_a_hub_has_one_deadline_however_often_a_byte_comes(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    with answering(begin, b"1", pause=0.02) as url, pytest.raises(UnreachableError, match="within"):
        await looked(url)
