"""TLS of the service: its certificate, which is read again when its files change, and whose certificates it takes.

A context is put together from the files as a whole and handed to each connection that begins (the callback of the name
that the client asks for comes first in a handshake). So a broken new pair changes nothing, and connections that are
open go on with what they began with. No session is resumed: a client whose authority was taken out is refused at once.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from refitd_client.http.tls import load_authorities, load_pair, stamp_of

CERTIFICATE_LOOK_SECONDS = 2.0

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


class ServerTls:
    """The certificate of a running service. `context` is what a server listens with; `fault` what is wrong with it."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            ValueError: a file cannot be used.
        """
        self.context = files.context()
        self.fault: str | None = None
        self._files = files
        self._stamp = self._stamped()
        self._now = files.context()
        self.context.sni_callback = self._chosen

    def _chosen(self, side: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        side.context = self._now

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        return stamp_of(self._files.cert, self._files.key, self._files.client_ca)

    def look(self) -> None:
        """Read the files again if they have changed. While they cannot be used, what was read before stays in use."""
        stamp = self._stamped()
        if stamp == self._stamp:
            self.fault = None
            return
        try:
            self._now = self._files.context()
        except ValueError as error:
            fault = f"{error}; connections get the certificate that was read before"
            if fault != self.fault:
                log.error("the new files for TLS cannot be used", reason=fault)
            self.fault = fault
        else:
            self._stamp, self.fault = stamp, None
            log.info("the certificate was read again", file=str(self._files.cert))

    async def watch(self, report: Callable[[str | None], None]) -> None:
        """Look at the files until cancelled, and report what is wrong with them, None where nothing is."""
        while True:
            await asyncio.to_thread(self.look)
            report(self.fault)
            await asyncio.sleep(CERTIFICATE_LOOK_SECONDS)
