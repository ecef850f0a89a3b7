"""Where the service is, the token for it, and how it is connected to.

    REFITD_URL         the service's URL, http://127.0.0.1:8700 by default; of a group all URLs, separated by commas
    REFITD_TOKEN       the bearer token
    REFITD_TOKEN_FILE  a file with the bearer token, read again for each request so that it can be rotated
    REFITD_READ_TOKEN_FILE
                       the same for a token that allows reading alone; it is sent where there is no other
    REFITD_CA_FILE      certificates (PEM) of the authorities of servers' certificates, in place of the system's
    REFITD_CLIENT_CERT  the client's certificate (PEM), for servers that want one (mTLS)
    REFITD_CLIENT_KEY   its key (PEM, not encrypted)

Arguments win over the environment, a token over a token file. Of a file with several tokens, one a line, the first is
sent: the service accepts each token of its own file, so both can work from the same file.

One process has one identity for TLS: its clients, and what a service calls, take the same files. Names are always
checked, and nothing turns that off. Files that are replaced are read again before the next connection; while they do
not fit together, what was read before stays in use.

An exchange has one deadline, and its answer a bound. httpx knows how long each byte may take to come, and not how long
an answer may: a server that sends a byte now and then would hold a trainer for ever, one whose answer has no end would
fill its memory. The deadline of a call that blocks is in a context variable, which what reads the connection looks at
before each read.
"""

import os
import ssl
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any

import httpcore  # httpx brings it
import httpx

MOST_PIECES = 10_000  # of an answer, besides those of a packet's size: each takes 20 µs, and may be of a byte
_PACKET = 1024
# A connection is not used twice: an answer that a proxy on the way repeats would be taken for that of the next call.
ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)

IDENTITY = {"Accept-Encoding": "identity"}

_UNTIL: ContextVar[float | None] = ContextVar("refitd_client_until", default=None)


class AnswerRefusedError(httpx.RequestError):
    """The answer is more than it may be, or compressed. The message is a sentence's end."""


class Body:
    """The pieces of a body of at most `most` bytes, of which nothing has been read."""

    def __init__(self, response: httpx.Response, most: int) -> None:
        """Raises AnswerRefusedError if it is compressed: a few bytes could become any number."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise AnswerRefusedError("its answer is compressed, which was not asked for")
        self._most = most
        self.pieces: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self._size += len(piece)
        if self._size > self._most or len(self.pieces) > MOST_PIECES + self._size // _PACKET:
            raise AnswerRefusedError(f"its answer has more than {self._most} bytes, or is in too many pieces")


def body_of(response: httpx.Response, most: int) -> bytes:
    """Read the body of a response, which was asked for with the headers `IDENTITY`. Raises AnswerRefusedError if it has
    more, is in too many pieces, or compressed.
    """
    body = Body(response, most)
    for piece in response.iter_bytes():
        body.add(piece)
    return b"".join(body.pieces)


@contextmanager
def ending_within(seconds: float) -> Generator[None]:
    """Give the call that blocks in here so many seconds for all of its exchange, with `BoundedTransport`. Raises
    TimeoutError if they were over before it was.
    """
    until = time.monotonic() + seconds
    token = _UNTIL.set(until)
    try:
        yield
    except httpx.TimeoutException as error:
        if time.monotonic() < until:
            raise
        raise TimeoutError from error
    finally:
        _UNTIL.reset(token)


def _left(timeout: float | None) -> float | None:
    """The seconds that a step may take, of those that are left for the exchange."""
    until = _UNTIL.get()
    if until is None:
        return timeout
    left = until - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout
    return left if timeout is None else min(timeout, left)


class BoundedTransport(httpx.HTTPTransport):
    """httpx's, whose exchanges end when `ending_within` says. `context` has the certificates."""

    def __init__(self, context: SSLContext) -> None:
        super().__init__(verify=context, trust_env=False, limits=ONE_CALL_EACH)
        self._pool = httpcore.ConnectionPool(
            ssl_context=context, max_keepalive_connections=0, network_backend=_Network()
        )


class _Network(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(host, port, _left(timeout), local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _left(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _left(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


_EXPIRED, _NOT_ITS_NAME, _OTHER_ADDRESS = 10, 62, 64  # X509_V_ERR_* (openssl/x509_vfy.h)
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Files for TLS as a client. `key` may be None where `cert` holds the key as well."""

    ca_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls) -> "ClientTls":
        return cls(ca_file=_named("REFITD_CA_FILE"), cert=_named("REFITD_CLIENT_CERT"), key=_named("REFITD_CLIENT_KEY"))

    def context(self) -> ssl.SSLContext:
        """What connections are made with: the same one as long as the files stay the same. Reads the files. Raises
        ValueError if the files cannot be used, and never could be since this process began.
        """
        with _CONTEXTS_LOCK:
            stamp, kept = stamp_of(self.ca_file, self.cert, self.key), _KEPT_CONTEXTS.get(self)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            try:
                made = self._made()
            except ValueError:
                if kept is None:
                    raise
                return kept[1]
            _KEPT_CONTEXTS[self] = (stamp, made)
            return made

    def _made(self) -> ssl.SSLContext:
        if self.key is not None and self.cert is None:
            raise ValueError(f"there is a key ({self.key}) and no certificate: set REFITD_CLIENT_CERT as well")
        if self.ca_file is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            load_authorities(context, self.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert is not None:
            load_pair(context, self.cert, self.key or self.cert)
        return context


Stamp = tuple[tuple[int, int, int] | None, ...]
_CONTEXTS_LOCK = threading.RLock()  # a signal handler may interrupt who holds it, and ask for it
_KEPT_CONTEXTS: dict[ClientTls, tuple[Stamp, ssl.SSLContext]] = {}
_own: ClientTls | None = None


def use(tls: ClientTls) -> None:
    """Have this process use these files, in place of those that its environment names."""
    global _own  # noqa: PLW0603 - a process has one identity
    _own = tls


def in_use() -> ClientTls:
    return _own or ClientTls.of_environment()


def _named(variable: str) -> Path | None:
    name = os.environ.get(variable)
    return Path(name) if name else None


def stamp_of(*files: Path | None) -> Stamp:
    """What changes when one of the files is replaced: of each its inode, size and time of change, None without it."""
    return tuple(None if file is None else _stat(file) for file in files)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load_authorities(context: ssl.SSLContext, file: Path) -> None:
    """Trust the certificates of a file. Raises ValueError if it cannot be read, or holds none."""
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise ValueError(f"{file} holds no certificate in PEM form ({_reason(error)})") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Show a certificate. Raises ValueError if a file cannot be read, holds something else, or the key does not belong
    to the certificate.
    """

    def refuse() -> str:
        raise ValueError(f"{key} is encrypted: write the key without a password, for its user alone (chmod 600)")

    try:
        for file in (cert, key):
            with file.open("rb"):
                pass
        context.load_cert_chain(cert, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key in {key} does not belong to the certificate in {cert}") from error
        raise ValueError(f"{cert} and {key} hold no certificate and key in PEM form ({_reason(error)})") from error
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM").replace("_", " ").lower()


def why_refused(error: BaseException | None) -> str | None:
    """Return why TLS failed, in a sentence of what to do; None where an error and its causes are of something else."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and (told := _told(error)) is not None:
            return told
        error = error.__cause__ or error.__context__
    return None


def _told(error: ssl.SSLError) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in {_NOT_ITS_NAME, _OTHER_ADDRESS}:
            return f"its certificate is for other names ({error.verify_message.rstrip('.')}): call it by one of them"
        if error.verify_code == _EXPIRED:
            return "its certificate has expired: its operator has to replace it"
        return (
            f"its certificate is not from an authority that is trusted here ({error.verify_message}): name the "
            "authority's file in REFITD_CA_FILE"
        )
    if error.reason in _NO_TLS:
        return "it does not speak TLS: write http:// if that is what it is meant to speak"
    if "ALERT" in (error.reason or ""):
        return (
            f"it refused the connection ({_reason(error)}): name a certificate from its --tls-client-ca in "
            "REFITD_CLIENT_CERT and REFITD_CLIENT_KEY"
        )
    return None


@cache
def no_certificates() -> ssl.SSLContext:
    """What httpx gets where a transport of its own has the certificates: the system's take 20 ms to read."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def blocking_transport(service_url: str) -> httpx.BaseTransport:
    """A transport for a service's URLs. Raises ValueError if the files for TLS cannot be used."""
    return RenewedTransport(in_use()) if "https://" in service_url else BoundedTransport(no_certificates())


class RenewedTransport(httpx.BaseTransport):
    """httpx's, with the certificates that the files hold when a connection is made: no connection is used twice."""

    def __init__(self, tls: ClientTls) -> None:
        self._tls = tls
        tls.context()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return BoundedTransport(self._tls.context()).handle_request(request)


DEFAULT_URL = "http://127.0.0.1:8700"


@dataclass(slots=True)
class ServiceReach:
    """What a publisher's calls to its service learn from each other. `is_down`: the last one had no answer, so that the
    next waits for one only briefly. `told` is what was logged last of why versions go by files.
    """

    is_down: bool = False
    told: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A checked URL without a slash at its end, and at most one of `token` and `token_file`.

    `others` are the URLs of the other services of a group, in the order in which they are tried.
    """

    url: str
    others: tuple[str, ...] = ()
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    reach: ServiceReach = field(default_factory=ServiceReach, repr=False, compare=False)

    @property
    def service_url(self) -> str:
        return ",".join((self.url, *self.others))

    def moved_on(self) -> "Connection":
        """The same with the next service of the group as the one that is asked."""
        return replace(self, url=self.others[0], others=(*self.others[1:], self.url)) if self.others else self

    def headers(self) -> dict[str, str]:
        """The `Authorization` header, or none. Reads the token file.

        Raises:
            OSError: the token file cannot be read.
            ValueError: what it holds cannot be a token.
        """
        token = self.token
        if self.token_file is not None:
            lines = self.token_file.read_text().strip().splitlines()
            token = _check_token(lines[0] if lines else "", f"the token file {self.token_file}")
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def connect_to(
    service_url: str | None = None, *, token: str | None = None, token_file: str | os.PathLike[str] | None = None
) -> Connection:
    """Decide where the service is and with which token it is asked. Raises ValueError if the URL is not one of an HTTP
    service, the token cannot be a token, or the files for TLS cannot be used.
    """
    named = service_url or os.environ.get("REFITD_URL") or DEFAULT_URL
    url, *others = dict.fromkeys(_check_url(each.strip()) for each in named.split(",") if each.strip() or named == each)
    if any(each.startswith("https://") for each in (url, *others)):
        in_use().context()
    if token is None and token_file is None:
        token = os.environ.get("REFITD_TOKEN") or None
        token_file = os.environ.get("REFITD_TOKEN_FILE") or os.environ.get("REFITD_READ_TOKEN_FILE") or None
    if token is not None:
        return Connection(url=url, others=tuple(others), token=_check_token(token, "the token (REFITD_TOKEN)"))
    return Connection(url=url, others=tuple(others), token_file=None if token_file is None else Path(token_file))


def _check_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(
            f"service URL {text!r} is no URL ({error}): write http://host:port, or set REFITD_URL"
        ) from error
    if url.userinfo:
        raise ValueError("the service URL holds a user name or password: pass a token, or a token file, instead")
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise ValueError(f"service URL {text!r} names no HTTP service: write http://host:port, or set REFITD_URL")
    return str(url).rstrip("/")


def _check_token(text: str, name: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{name} is empty or holds characters that a bearer token cannot have")
    return token
