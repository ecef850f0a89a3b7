"""TLS of the service: its certificate, which is read again when its files change, and whose certificates it takes.

A context is put together from the files as a whole and handed to each connection that begins (the callback of the name
that the client asks for comes first in a handshake). So a broken new pair changes nothing, and connections that are
open go on with what they began with. No session is resumed: a client whose authority was taken out is refused at once.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from refitd_client.http.tls import load_authorities, load_pair, stamp_of

CERTIFICATE_LOOK_SECONDS = 2.0
SOON_DAYS = 14
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME (openssl/x509_vfy.h): it is read to see when it expires
_DAY = 86400.0
_FLIGHTS = 3  # of a handshake: two of TLS 1.3, and one more of TLS 1.2

log = structlog.get_logger("refitd")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Certificate (with those between it and its authority) and key; `client_ca`: whose certificates clients need."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """What connections are taken with. Reads the files.

        Clients without a certificate get that far that they can be told what they lack (`connection.py`).

        Raises:
            ValueError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        context.num_tickets = 0
        load_pair(context, self.cert, self.key)
        if self.client_ca is not None:
            load_authorities(context, self.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def expires(self) -> float:
        """When the certificate expires, in seconds since 1970. Reads the files.

        Python reads the fields of a certificate that a peer has shown, so it is shown to this process itself.

        Raises:
            ValueError: a file cannot be used, or the certificate is not one of a server.
        """
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_pair(server, self.cert, self.key)
        client.check_hostname = False
        load_authorities(client, self.cert)
        client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        asks, answers = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
        try:
            for _ in range(_FLIGHTS):
                _shake_hands(asks)
                _shake_hands(answers)
        except ssl.SSLError as error:
            raise ValueError(f"{self.cert} holds no certificate that a server can show ({error.reason})") from error
        return float(ssl.cert_time_to_seconds(str((asks.getpeercert() or {})["notAfter"])))


def _shake_hands(side: ssl.SSLObject) -> None:
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()


def expiry_fault(cert: Path, expires: float, now: float) -> str | None:
    """Return that a certificate has expired or is about to, None where it is not. Times are seconds since 1970."""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires))
    if expires <= now:
        return f"the certificate in {cert} expired at {day}: every client refuses it"
    if expires - now <= SOON_DAYS * _DAY:
        return f"the certificate in {cert} expires at {day}: replace the file, it is read without a restart"
    return None


class ServerTls:
    """The certificate of a running service. `context` is what a server listens with; `fault` what is wrong with it."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.time) -> None:
        """Read the files.

        Args:
            files: for TLS.
            clock: seconds since 1970.

        Raises:
            ValueError: a file cannot be used.
        """
        self.context = files.context()
        self.fault: str | None = None
        self._files, self._clock = files, clock
        self._stamp = self._stamped()
        self._now, self._expires = files.context(), files.expires()
        self._broken: str | None = None
        self.context.sni_callback = self._chosen
        self.look()

    def _chosen(self, side: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        side.context = self._now

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        return stamp_of(self._files.cert, self._files.key, self._files.client_ca)

    def look(self) -> None:
        """Read the files again if they have changed. While they cannot be used, what was read before stays in use."""
        stamp = self._stamped()
        if stamp != self._stamp:
            try:
                self._now, self._expires = self._files.context(), self._files.expires()
            except ValueError as error:
                self._say(f"{error}; connections get the certificate that was read before")
            else:
                self._stamp, self._broken = stamp, None
                log.info("the certificate was read again", file=str(self._files.cert))
        self.fault = self._broken or expiry_fault(self._files.cert, self._expires, self._clock())

    def _say(self, fault: str) -> None:
        if fault != self._broken:
            log.error("the new files for TLS cannot be used", reason=fault)
        self._broken = fault

    async def watch(self, report: Callable[[str | None], None]) -> None:
        """Look at the files until cancelled, and report what is wrong with them, None where nothing is."""
        while True:
            await asyncio.to_thread(self.look)
            report(self.fault)
            await asyncio.sleep(CERTIFICATE_LOOK_SECONDS)
