"""Connections to engines: a call by TLS is answered as one in the clear is, and without trust nothing is sent."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd_client.http import connection
from support.certificates import Authority


class SecureEngine:
    """A server with a certificate, which answers each call, closes only when the other side does, and counts."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.closed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        await writer.drain()
        writer.write(b'{"a": 1}')
        with suppress(ConnectionError):
            await reader.read()
        self.closed.set()
        writer.close()


@asynccontextmanager
async def secure_engine(authority: Authority) -> AsyncGenerator[tuple[SecureEngine, str]]:
    """An engine, and its URL."""
    engine, pair = SecureEngine(), authority.issue("localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, ssl=context)
    async with server, asyncio.timeout(20):
        yield engine, f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_engine_behind_tls_is_asked_over_a_connection_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "trusted")
    monkeypatch.setattr(connection, "_own", connection.ClientTls(ca_file=authority.file))
    async with secure_engine(authority) as (engine, url):
        reply = await Transport(url, api_key="secret", admin_key=None).get("/model_info", 10.0)
        assert isinstance(reply, Reply), reply
        assert (reply.data, reply.address) == ({"a": 1}, f"localhost:{url.rpartition(':')[2]}")
        assert b"Bearer secret" in engine.asked[0]
        await engine.closed.wait()


async def test_an_engine_that_is_not_trusted_is_sent_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = Authority(tmp_path / "trusted").file
    monkeypatch.setattr(
        connection, "_own", connection.ClientTls(ca_file=trusted)
    )  # another test of this process may have set it
    async with secure_engine(Authority(tmp_path / "another")) as (engine, url):
        reply = await Transport(url, api_key="secret", admin_key=None).post("/load", {}, 10.0)
        assert isinstance(reply, NoReply)
        assert (reply.lost, engine.asked) == (CallFailure.NEVER_SENT, [])
