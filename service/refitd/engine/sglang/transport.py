"""HTTP to one SGLang server: one connection pool, a deadline for each call, and what came back as a value.

No redirects and no proxies from the environment: keys go to the server that the operator named and nowhere else.
"""

import asyncio
import functools
import ssl
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import httpx
import msgspec

from refitd.engine.dialing import CheckedTransport, Guard
from refitd.engine.keys import Key, KeyRefusedError

_ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)
"""A connection is not used twice. An answer that a proxy on the way repeats would be taken for that of the next call,
and one that the server closes just then (uvicorn after 5 s) gives no answer: after a load, unknown contents."""
_REFUSED = frozenset({401, 403})  # the key was not right, and nothing was done
MAX_BODY_BYTES = 64 * 2**20  # the checksums of a hundred thousand tensors are a tenth of this


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered. `data` is its JSON object, None where it sent something else."""

    status: int
    text: str
    data: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        """A status of 2xx."""
        return 200 <= self.status < 300


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

    A key is given as it is, or as the path of its file. `guard` says which addresses may be called.
    """

    def __init__(
        self, url: str, *, api_key: str | Path | None, admin_key: str | Path | None, guard: Guard | None = None
    ) -> None:
        self.url = url
        self._read = Key(api_key or admin_key)
        self._change = Key(admin_key or api_key)
        tls = _certificates() if url.startswith("https") else False
        self._client = httpx.AsyncClient(
            base_url=url,
            transport=None if guard is None else CheckedTransport(guard, tls, _ONE_CALL_EACH),
            verify=tls,
            limits=_ONE_CALL_EACH,
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # noqa: S113 - each call has a deadline of its own
        )

    async def get(self, path: str, within: float) -> Reply | NoReply:
        """Read something, within seconds."""
        return await self._call("GET", path, None, self._read, within)

    async def post(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """Change something, within seconds."""
        return await self._call("POST", path, body, self._change, within)

    async def ask(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        """Ask something that needs a body, within seconds. It changes nothing, so the key for reads opens it."""
        return await self._call("POST", path, body, self._read, within)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

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
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            return NoReply(Lost.NEVER_SENT, f"{self.url} cannot be reached: {error}")
        except _TooLargeError:
            return NoReply(Lost.NO_ANSWER, f"{self.url}{path} answered with more than {MAX_BODY_BYTES} bytes")
        except (httpx.HTTPError, httpx.StreamError, OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            return NoReply(Lost.NO_ANSWER, f"{self.url}{path} broke off without an answer: {what}")

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, key: Key) -> Reply:
        async with self._client.stream(method, path, json=body, headers=await key.headers()) as response:
            return _reply(response.status_code, await _body(response))


class _TooLargeError(Exception):
    pass


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _TooLargeError
    return bytes(body)


def _reply(status: int, body: bytes) -> Reply:
    try:
        data = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        data = None
    return Reply(status=status, text=body[:2000].decode(errors="replace"), data=data)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's, once for all engines: a context takes 20 ms to make."""
    return ssl.create_default_context()
