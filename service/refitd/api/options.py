"""The settings of `refitd serve` that are about who may call it: the address, names and bearer tokens."""

import asyncio
import os
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refitd.policy.roster import OperatorHosts
from refitd.text import host_patterns
from refitd.tokens import MAX_HOSTS, Tokens, tokens_from
from refitd_client.contract.wire import Keeping
from refitd_client.http.connection import ClientTls, load_authorities, load_pair, stamp_of

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
    """The certificate of a running service, read again when its files change.

    A context is put together from the files as a whole and handed to each connection that begins (the callback of the
    name that the client asks for comes first in a handshake). So a broken new pair changes nothing, and connections
    that are open go on with what they began with. No session is resumed: a client whose authority was taken out is
    refused at once. `context` is what a server listens with; `fault` what is wrong with the files.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiValues:
    """What the routes get of the settings. `root` is as it was named."""

    access: "AccessSettings"
    root: Path
    operator_hosts: OperatorHosts
    quorum: int
    keeping: Keeping


LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_both(given: Collection[str], one: str, other: str) -> None:
    if one in given and other not in given:
        raise ValueError(f"--{one.replace('_', '-')} needs --{other.replace('_', '-')} as well")


class AccessSettings(BaseSettings):
    """Where the service listens, and what opens it."""

    model_config = SettingsConfigDict(
        env_prefix="REFITD_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_empty_tokens(cls, given: dict[str, Any]) -> dict[str, Any]:
        """An empty variable is one that is not set, but for tokens: a secret that was not filled in opens nothing."""
        for name in cls.model_fields:
            variable, is_replaced = f"REFITD_{name.upper()}", not given.keys().isdisjoint({name, f"{name}_file"})
            if "token" in name and not is_replaced and os.environ.get(variable) == "":
                raise ValueError(f"{variable} is empty: put a token into it, or leave the setting out")
        return given

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback only with a token")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on (0: any free one, printed)")
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(_split), AfterValidator(host_patterns)] = Field(
        default=[],
        description="Names (or *.patterns) that the service may be called by where no token is needed, besides "
        "addresses, localhost and --host (comma-separated in the environment)",
    )
    token: SecretStr | None = Field(default=None, description="Bearer token for everything that changes anything")
    token_file: Path | None = Field(
        default=None, description="File with the bearer token; several, one per line, during a rotation"
    )
    read_token_file: Path | None = Field(
        default=None, description="File with the token that only reads, or several (default: reading needs none)"
    )
    followers_token_file: Path | None = Field(
        default=None,
        description="File with tokens that only follow, one a line, also as name:token for the host of that name "
        "(docs/security.md)",
    )
    tls_cert: Path | None = Field(
        default=None, description="File with the certificate for HTTPS (PEM), read again when it changes"
    )
    tls_key: Path | None = Field(default=None, description="File with its key")
    tls_client_ca: Path | None = Field(
        default=None,
        description="File with the authorities whose certificates clients have to show (mTLS); /healthz and /readyz "
        "need none",
    )
    ca_file: Path | None = Field(
        default=None,
        description="File with the authorities that what this service calls over HTTPS has to have its certificate "
        "from: upstreams, engines (default: the system's)",
    )
    client_cert: Path | None = Field(
        default=None, description="File with the certificate that this service shows there"
    )
    client_key: Path | None = Field(default=None, description="File with its key")
    insecure: bool = Field(
        default=False,
        description="Start without a token although engines have keys: any user of this machine can then change them",
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files for HTTPS; None for a service that speaks plain HTTP."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def client_tls(self) -> ClientTls:
        """The files for what this service calls over HTTPS."""
        return ClientTls(ca_file=self.ca_file, cert=self.client_cert, key=self.client_key)

    def check_access(self) -> None:
        """Refuse tokens that cannot be read, an address that other machines reach without a token, half of a pair.

        Raises:
            ValueError: with a sentence that names the setting.
        """
        try:
            tokens = self.tokens()
        except OSError as error:
            raise ValueError(f"the token file {error.filename} cannot be read: {error.strerror}") from error
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
            _check_both(self.model_fields_set, one, other)
        for one, other in (("client_cert", "client_key"), ("client_key", "client_cert")):
            _check_both(self.model_fields_set, one, other)
        for name, of_role in (("read", tokens.read), ("follower's", tokens.follow)):
            if of_role and not tokens.write:
                raise ValueError(
                    f"a {name} token without a write token leaves every change open: set --token-file "
                    "(REFITD_TOKEN_FILE) or REFITD_TOKEN too"
                )
        if self.host not in LOOPBACK and not tokens.write:
            raise ValueError(
                f"host {self.host} is reachable from other machines: set a token (REFITD_TOKEN or --token-file) first"
            )

    @property
    def has_token_files(self) -> bool:
        files = (self.token_file, self.read_token_file, self.followers_token_file)
        return any(file is not None for file in files)

    @property
    def wants_token(self) -> bool:
        return any((self.token, self.token_file, self.read_token_file))

    def tokens(self) -> Tokens:
        """Return the bearer tokens, a file's before a variable's; read for each request, so that they can be rotated.

        Raises:
            TokensRefusedError: one is set and empty, or cannot be a token.
            OSError: a file cannot be read.
        """
        return Tokens(
            write=tokens_from("token", self.token, self.token_file),
            read=tokens_from("read_token", None, self.read_token_file),
            follow=tokens_from("followers_token", None, self.followers_token_file, MAX_HOSTS),
        )
