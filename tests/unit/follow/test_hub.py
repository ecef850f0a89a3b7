"""A hub that is none, or a hostile one: what a host that asks it may lose of its time and memory."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from refitd_client.http.connection import Connection
from refitd_hosts.follow import hub
from refitd_hosts.follow.hub import HubUpstream
from refitd_hosts.follow.upstream import UnreachableError
from support.endless_server import CHUNK, CHUNKED, OK, answering


async def looked(url: str) -> None:
    async with asyncio.timeout(30), aclosing(HubUpstream(Connection(url=url))) as upstream:
        await upstream.look(None)


async def heard(url: str) -> None:
    async with asyncio.timeout(30), aclosing(HubUpstream(Connection(url=url))) as upstream:
        async for _ in upstream.changes("host"):
            pass


Ask = Callable[[str], Awaitable[None]]
EACH = pytest.mark.parametrize("ask", [looked, heard])


@EACH
async def test_an_answer_of_a_hub_without_end_is_read_no_further(ask: Ask) -> None:
    with answering(CHUNKED, CHUNK) as url, pytest.raises(UnreachableError, match="more than"):
        await ask(url)


@EACH
@pytest.mark.parametrize("begin", [OK + b"X-Slow: ", OK + b"Content-Length: 100000\r\n\r\n"], ids=["head", "body"])
async def test_an_answer_of_a_hub_has_one_deadline_however_often_a_byte_comes(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    with answering(begin, b"1", pause=0.02) as url, pytest.raises(UnreachableError, match="within"):
        await ask(url)


def test_a_hub_is_refused_before_anything_is_sent_where_its_url_or_files_for_tls_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="names no HTTP service"):
        HubUpstream(Connection(url="ftp://hub"))
    monkeypatch.setenv("REFITD_CA_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setattr("refitd_client.http.connection._own", None)
    with pytest.raises(ValueError, match="cannot be read"):
        HubUpstream(Connection(url="https://hub"))
