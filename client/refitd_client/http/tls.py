"""TLS as a client: the authorities that servers' certificates have to come from, and the certificate that it shows.

    REFITD_CA_FILE      certificates (PEM) of these authorities, in place of the system's
    REFITD_CLIENT_CERT  the client's certificate (PEM), for servers that want one (mTLS)
    REFITD_CLIENT_KEY   its key (PEM, not encrypted)

One process has one identity: its clients, and what a service calls, take the same files. Names are always checked, and
nothing turns that off. Files that are replaced are read again before the next connection; while they do not fit
together, what was read before stays in use.
"""

import asyncio
import os
import ssl
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx

from refitd_client.http.bounds import ONE_CALL_EACH, BoundedTransport

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
        """The files that the environment names."""
        return cls(ca_file=_named("REFITD_CA_FILE"), cert=_named("REFITD_CLIENT_CERT"), key=_named("REFITD_CLIENT_KEY"))

    def context(self) -> ssl.SSLContext:
        """What connections are made with: the same one as long as the files stay the same. Reads the files.

        Raises:
            ValueError: the files cannot be used, and never could be since this process began.
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
    """The files that this process uses."""
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
    """Trust the certificates of a file.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise ValueError(f"{file} holds no certificate in PEM form ({_reason(error)})") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Show a certificate.

    Raises:
        ValueError: a file cannot be read, holds something else, or the key does not belong to the certificate.
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
    """A transport for a service's URLs.

    Raises:
        ValueError: the files for TLS cannot be used.
    """
    return RenewedTransport(in_use()) if "https://" in service_url else BoundedTransport(no_certificates())


def async_tls(service_url: str) -> "AsyncRenewedTransport | None":
    """The same for a client that is awaited; None where httpx's own will do, without TLS."""
    return AsyncRenewedTransport(in_use()) if "https://" in service_url else None


class RenewedTransport(httpx.BaseTransport):
    """httpx's, with the certificates that the files hold when a connection is made."""

    def __init__(self, tls: ClientTls) -> None:
        """Raises `ValueError` where the files cannot be used."""
        self._tls = tls
        self._made(tls.context())

    def _made(self, context: ssl.SSLContext) -> BoundedTransport:
        inner = BoundedTransport(context)
        self._now = (context, inner)
        return inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        context, (before, inner) = self._tls.context(), self._now
        return (inner if context is before else self._made(context)).handle_request(request)

    def close(self) -> None:
        """See httpx."""
        self._now[1].close()


class AsyncRenewedTransport(httpx.AsyncBaseTransport):
    """The same for clients that are awaited."""

    def __init__(self, tls: ClientTls) -> None:
        """Raises `ValueError` where the files cannot be used."""
        self._tls = tls
        self._made(tls.context())

    def _made(self, context: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
        inner = httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=ONE_CALL_EACH)
        self._now = (context, inner)
        return inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        context, (before, inner) = await asyncio.to_thread(self._tls.context), self._now
        return await (inner if context is before else self._made(context)).handle_async_request(request)

    async def aclose(self) -> None:
        """See httpx."""
        await self._now[1].aclose()
