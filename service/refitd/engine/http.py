"""HTTP to one server: a connection and a deadline for each call, and what came back as a value.

No redirects and no proxies from the environment: keys go to the server that the operator named and nowhere else.
"""

import asyncio
import errno
import functools
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import httpcore
import httpx
import msgspec

from refitd.engine.dialing import CheckedNetwork, Guard
from refitd.engine.keys import Key, KeyRefusedError
from refitd.engine.sockets import Sockets

_PORTS = {"http": 80, "https": 443}
_HEADERS: Mapping[str | bytes, str | bytes] = {
    "Accept": "application/json",
    "Content-Type": "application/json",
    "Connection": "close",
}
_REFUSED = frozenset({401, 403})  # the key was not right, and nothing was done
_CONNECT_FAILED = re.compile(r"\[Errno (\d+)\] Connect call failed")  # asyncio's, one for each address
_SHORT = 500  # characters
MAX_BODY_BYTES = 64 * 2**20  # the checksums of a hundred thousand tensors are a tenth of this


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered. `data` is its JSON object, None where it sent something else; `date` is its own clock,
    `address` where it was reached, equal for two names of one server.
    """

    status: int
    text: str
    data: dict[str, Any] | None
    date: str | None = None
    address: str | None = None

    @property
    def ok(self) -> bool:
        """A status of 2xx."""
        return 200 <= self.status < 300

    @property
    def message(self) -> str:
        """What it says to people: in a field of its JSON object, or as the text that it is."""
        for key in ("message", "detail", "error"):
            found = (self.data or {}).get(key)
            if isinstance(found, str):
                return found
        return self.text.strip() or "nothing"

    @property
    def short_message(self) -> str:
        """At most 500 characters of the message."""
        return self.message[:_SHORT]


class Lost(Enum):
    """Why there is no reply: whether the server can have begun to act is what counts."""

    NEVER_SENT = auto()
    NO_ANSWER = auto()
    TIMED_OUT = auto()


@dataclass(frozen=True, slots=True)
class NoReply:
    """There is no reply."""

    lost: Lost
    reason: str


class Transport:
    """Calls to one server. `api_key` opens reads; `admin_key` (the same where there is none) opens changes.

    A key is given as it is, or as the path of its file. `guard` says which addresses may be called; `server` is what
    sentences call what listens there.
    A connection is not used twice. An answer that a proxy on the way repeats would be taken for that of the next call,
    and one that the server closes just then (uvicorn after 5 s) gives no answer: after a load, unknown contents.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | Path | None,
        admin_key: str | Path | None,
        guard: Guard | None = None,
        server: str = "engine",
    ) -> None:
        self.url = url
        self._server = server
        self._read = Key(api_key or admin_key)
        self._change = Key(admin_key or api_key)
        at = httpx.URL(url)
        self._origin = httpcore.Origin(at.raw_scheme, at.raw_host, at.port or _PORTS[at.scheme])
        self._prefix = at.raw_path.rstrip(b"/")
        self._headers = {**_HEADERS, "Host": at.netloc}
        self._network = Sockets() if guard is None else CheckedNetwork(guard)

    async def get(self, path: str, within: float) -> Reply | NoReply:
        """Read something, within seconds."""
        return await self._call("GET", path, None, self._read, within)

    async def post(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """Change something, within seconds."""
        return await self._call("POST", path, body, self._change, within)

    async def ask(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """Ask something that needs a body, within seconds. It changes nothing, so the key for reads opens it."""
        return await self._call("POST", path, body, self._read, within)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, key: Key, within: float
    ) -> Reply | NoReply:
        try:
            async with asyncio.timeout(within):
                reply = await self._send(method, path, body, key)
                if reply.status in _REFUSED and await key.is_another_now():
                    reply = await self._send(method, path, body, key)
                return reply
        except KeyRefusedError as error:
            return NoReply(Lost.NEVER_SENT, f"{self.url} was not asked: {error}")
        except TimeoutError:
            return NoReply(Lost.TIMED_OUT, f"{self.url}{path} did not answer within {within:g} s")
        except (httpcore.ConnectError, httpcore.UnsupportedProtocol) as error:
            return NoReply(Lost.NEVER_SENT, f"{self.url} cannot be reached: {_spoken(error, self._server)}")
        except _TooLargeError:
            return NoReply(Lost.NO_ANSWER, f"{self.url}{path} answered with more than {MAX_BODY_BYTES} bytes")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            return NoReply(Lost.NO_ANSWER, f"{self.url}{path} broke off without an answer: {what}")

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, key: Key) -> Reply:
        content = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, **await key.headers()}
        at = self._origin
        url = httpcore.URL(scheme=at.scheme, host=at.host, port=at.port, target=self._prefix + path.encode())
        tls = _certificates() if at.scheme == b"https" else None
        async with (
            httpcore.AsyncHTTPConnection(at, tls, network_backend=self._network) as connection,
            connection.stream(method, url, headers=headers, content=content) as response,
        ):
            date = next((value.decode() for name, value in response.headers if name.lower() == b"date"), None)
            extensions = cast("dict[str, Any]", response.extensions)  # pyright: ignore[reportUnknownMemberType]
            address = _address(extensions["network_stream"])
            return replace(_reply(response.status, await _body(response), date), address=address)


def _spoken(error: Exception, server: str) -> str:
    """Why a connection did not come about, in the system's words and not in those of Python around them."""
    numbers = {int(number) for number in _CONNECT_FAILED.findall(str(error))}  # a name may have several addresses
    if numbers == {errno.ECONNREFUSED}:
        return f"connection refused (is the {server} running there?)"
    return os.strerror(numbers.pop()).lower() if len(numbers) == 1 else str(error)


class _TooLargeError(Exception):
    pass


async def _body(response: httpcore.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _TooLargeError
    return bytes(body)


def _address(stream: httpcore.AsyncNetworkStream) -> str:
    """Host and port of the server; its own addresses are all the same host to a client on the same one."""
    host, port = stream.get_extra_info("peername")[:2]
    own = stream.get_extra_info("sockname")[0]
    return f"{'localhost' if host == own or ip_address(host).is_loopback else host}:{port}"


def _reply(status: int, body: bytes, date: str | None) -> Reply:
    try:
        data = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        data = None
    return Reply(status=status, text=body[:2000].decode(errors="replace"), data=data, date=date)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's, once for all engines: a context takes 20 ms to make."""
    return ssl.create_default_context()
