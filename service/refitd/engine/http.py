"""HTTP to one server: a connection and a deadline for each call. The answer, or why there is none, is a value.

No redirects and no proxies from the environment: keys go to the server that the operator named and nowhere else. A key
file is read when the key is first needed, and again when the server refuses the key, so keys can be rotated.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import httpx
import msgspec

from refitd.clock import my_turn
from refitd.engine.wire import (
    Connect,
    EngineConnection,
    Exchange,
    Guard,
    NotConnectedError,
    Request,
    TooLargeError,
    UnsendableError,
    connect_by_tls,
    connect_in_the_clear,
    dial,
)
from refitd.memory import BodyMemory
from refitd.text import one_line
from refitd_client.contract.decoding import from_json, plain_json
from refitd_client.http.connection import in_use

T = TypeVar("T")

# How long a call to an engine's server may take, in seconds.
PROBE_SECONDS = 5.0
CALL_SECONDS = 30.0  # pause, resume, flush, label: seconds at most on a server that works
CHECK_SECONDS = 120.0  # to hash all tensors
TRIAL_SECONDS = 60.0
_PORTS = {"http": 80, "https": 443}
_ASK_HEADERS = (("Accept", "application/json"), ("Content-Type", "application/json"), ("Connection", "close"))
UNAUTHORISED = frozenset({401, 403})  # the key was not right, and nothing was done
_SHORT_MESSAGE = 500  # characters
MAX_BODY_BYTES = 4 * 2**20
_UNTYPED_VALUES = 20_000  # of an answer without a type
CHECKSUMS_BYTES = 16 * 2**20  # of a hundred thousand tensors they are half of this
ANSWERS = BodyMemory(most=256 * 2**20)  # of all engines at once
OVERVIEW_BYTES = 64 * 2**20  # refitd's own, of ten thousand engines


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered.

    Attributes:
        status: of HTTP.
        body: as it came. Nothing is made of it until a type is asked for, which skips what it does not know.
        address: host and port that were called, equal for two names of one server.
    """

    status: int
    body: bytes = field(repr=False)
    address: str | None = None
    nothing_listens: ClassVar[bool] = False  # as of `NoReply`

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_unauthorised(self) -> bool:
        return self.status in UNAUTHORISED

    @property
    def is_incomplete(self) -> bool:
        return self.status in {400, 422}

    @property
    def has_no_route(self) -> bool:
        return self.status in {404, 405}

    def read_as(self, kind: type[T]) -> T:
        """The body as an object of a type.

        Raises:
            msgspec.ValidationError: it is no JSON, or of another form.
        """
        try:
            return from_json(self.body, kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise msgspec.ValidationError(str(error)) from error

    @property
    def text(self) -> str:
        return self.body[:2000].decode(errors="replace")

    @property
    def data(self) -> dict[str, Any] | None:
        """The JSON object in the body, for a few fields of a small answer; None where it is large or something else."""
        try:
            data = plain_json(self.body, _UNTYPED_VALUES)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return cast("dict[str, Any]", data) if isinstance(data, dict) else None

    @property
    def message(self) -> str:
        """Its text for people: from a field of its JSON object, else the body."""
        data = self.data or {}
        for key in ("message", "detail", "error"):
            found: Any = data.get(key)
            if isinstance(found, dict):  # vLLM nests it
                found = cast("dict[str, Any]", found).get("message")
            if isinstance(found, str):
                return found
        return self.text.strip() or "nothing"

    @property
    def short_message(self) -> str:
        return one_line(self.message[:_SHORT_MESSAGE])


class CallFailure(Enum):
    """How a call ended without a reply. After all but `NEVER_SENT` the server may have begun to act; after `DIED` it
    does not act any more.
    """

    NEVER_SENT = auto()
    NO_ANSWER = auto()
    TIMED_OUT = auto()
    DIED = auto()


@dataclass(frozen=True, slots=True)
class NoReply:
    """Why there is no reply, as a sentence; `lost` says whether the server can have begun to act.

    `nothing_listens`: every address of the server refused the connection.
    """

    lost: CallFailure
    reason: str
    nothing_listens: bool = False


class KeyRefusedError(Exception):
    """There is no key to send, so nothing was sent. The message names the file, never its content."""


class Key:
    """A key, or none. `source` is the key itself or the file that holds it."""

    def __init__(self, source: str | Path | None) -> None:
        self._file = source if isinstance(source, Path) else None
        self._key = None if isinstance(source, Path) else source

    async def headers(self) -> dict[str, str]:
        """The `Authorization` header, or none.

        Raises:
            KeyRefusedError: the file cannot be read, or holds no key.
        """
        if self._file is not None and self._key is None:
            self._key = await asyncio.to_thread(_read, self._file)
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    async def is_another_now(self) -> bool:
        """Read the file again; whether it holds another key than before.

        Raises:
            KeyRefusedError: as `headers`.
        """
        if self._file is None:
            return False
        before, self._key = self._key, await asyncio.to_thread(_read, self._file)
        return self._key != before


def _read(file: Path) -> str:
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise KeyRefusedError(f"the key file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise KeyRefusedError(f"the key file {file} is no text") from None
    # An HTTP library would quote a key that is no header, and with it the key, in its error and so in every log.
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise KeyRefusedError(f"the key file {file} is empty or holds what cannot be a key: write one key, on one line")
    return key


class Transport:
    """Calls to one server.

    A connection is not used twice: an answer that a proxy repeats would be taken for that of the next call, and a
    connection that the server closes just then (uvicorn after 5 s) gives no answer, which after a load means unknown
    contents.
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
        """Open no connection yet.

        Args:
            url: of the server, without a path or with a prefix of all routes.
            api_key: opens reads: the key itself, or the path of its file. None: `admin_key`.
            admin_key: opens changes, likewise. None: `api_key`.
            guard: says which addresses may be called. None: all.
            server: what sentences call the server, such as "engine" or "service".
        """
        self.url = url
        self._server = server
        self._read = Key(api_key or admin_key)
        self._change = Key(admin_key or api_key)
        at = httpx.URL(url)
        self._host, self._port = at.raw_host.decode(), at.port or _PORTS[at.scheme]
        self._is_tls = at.scheme == "https"
        self._prefix = at.raw_path.rstrip(b"/")
        self._headers = (("Host", at.netloc.decode()), *_ASK_HEADERS)
        self._guard = guard

    async def get(self, path: str, within: float, *, most: int = MAX_BODY_BYTES) -> Reply | NoReply:
        return await self._call("GET", path, None, self._read, within, most)

    async def post(
        self, path: str, body: dict[str, Any], within: float, *, most: int = MAX_BODY_BYTES
    ) -> Reply | NoReply:
        return await self._call("POST", path, body, self._change, within, most)

    async def put(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        return await self._call("PUT", path, body, self._change, within)

    async def ask(self, path: str, body: dict[str, Any], within: float) -> Reply | NoReply:
        return await self._call("POST", path, body, self._read, within)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, key: Key, within: float, most: int = MAX_BODY_BYTES
    ) -> Reply | NoReply:
        try:
            await my_turn()
            async with asyncio.timeout(within):
                reply = await self._send(method, path, body, key, most)
                if reply.is_unauthorised and await key.is_another_now():
                    reply = await self._send(method, path, body, key, most)
                return reply
        except (KeyRefusedError, UnsendableError) as error:
            return NoReply(CallFailure.NEVER_SENT, f"{self.url} was not asked: {error}")
        except TimeoutError:
            return NoReply(CallFailure.TIMED_OUT, f"{self.url}{path} did not answer within {within:g} s")
        except NotConnectedError as error:
            reason = f"connection refused (is the {self._server} running there?)" if error.nothing_listens else error
            text = f"{self.url} cannot be reached: {reason}"
            return NoReply(CallFailure.NEVER_SENT, text, nothing_listens=error.nothing_listens)
        except TooLargeError as error:
            return NoReply(CallFailure.NO_ANSWER, f"{self.url}{path} answered with {error}")
        except (OSError, ValueError) as error:
            what = str(error) or type(error).__name__
            return NoReply(CallFailure.NO_ANSWER, f"{self.url}{path} broke off without an answer: {what}")

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, key: Key, most: int) -> Reply:
        headers = (*self._headers, *(await key.headers()).items())
        content = None if body is None else msgspec.json.encode(body)
        talk = Exchange(Request(method, self._prefix + path.encode(), headers, content), most, ANSWERS)
        connection = await dial(self._host, self._guard, await self._way())
        try:
            ends = connection.ends()
            await connection.send(talk.request)
            answer = await talk.answer(connection.receive)
            return Reply(status=answer.status, body=answer.body, address=_address(*ends))
        finally:
            connection.close()

    async def _way(self) -> Connect[EngineConnection]:
        if not self._is_tls:
            return lambda address: connect_in_the_clear(address, self._port)
        context = await asyncio.to_thread(in_use().context)
        return lambda address: connect_by_tls(address, self._port, context, self._host)


def _address(there: Any, here: Any) -> str:
    """Host and port of the server. All addresses of this host are the same server, so they count as one. `there`: the
    socket address of the server. `here`: that of this side.
    """
    host, port = there[:2]
    return f"{'localhost' if host == here[0] or _is_loopback(host) else host}:{port}"


@lru_cache(maxsize=4096)
def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback
