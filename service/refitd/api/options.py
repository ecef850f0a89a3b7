"""The settings of `refitd serve` that are about who may call it: the address, names and bearer tokens."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refitd.text import host_patterns
from refitd.tokens import Tokens, tokens_from

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class AccessSettings(BaseSettings):
    """Where the service listens, and what opens it."""

    model_config = SettingsConfigDict(env_prefix="REFITD_", frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback only with a token")
    port: int = Field(default=8700, ge=0, le=65535, description="Port to listen on (0: any free one, printed)")
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(_split), AfterValidator(host_patterns)] = Field(
        default=[],
        description="Names (or *.patterns) that the service may be called by where no token is needed, besides "
        "addresses, localhost and --host (comma-separated in the environment)",
    )
    token: SecretStr | None = Field(default=None, description="Bearer token for everything that changes anything")
    token_file: Path | None = Field(
        default=None, description="File with that token; several, one per line, during a rotation"
    )
    read_token: SecretStr | None = Field(
        default=None, description="Bearer token for reading (default: reading needs none)"
    )
    read_token_file: Path | None = Field(default=None, description="File with that token, or several")
    insecure: bool = Field(
        default=False,
        description="Start without a token although engines have keys: any user of this machine can then change them",
    )

    def check_access(self) -> None:
        """Refuse tokens that cannot be read, and an address that other machines reach without a token.

        Raises:
            ValueError: with a sentence that names the setting.
        """
        try:
            tokens = self.tokens()
        except OSError as error:
            raise ValueError(f"the token file {error.filename} cannot be read: {error.strerror}") from error
        if tokens.read and not tokens.write:
            raise ValueError("a read token without a write token leaves every change open: set REFITD_TOKEN(_FILE) too")
        if self.host not in LOOPBACK and not tokens.write:
            raise ValueError(
                f"host {self.host} is reachable from other machines: set a token (REFITD_TOKEN or --token-file) first"
            )

    @property
    def wants_token(self) -> bool:
        """Whether any request needs a token."""
        return any((self.token, self.token_file, self.read_token, self.read_token_file))

    def tokens(self) -> Tokens:
        """Return the bearer tokens, a file's before a variable's; read for each request, so that they can be rotated.

        Raises:
            TokensRefusedError: one is set and empty, or cannot be a token.
            OSError: a file cannot be read.
        """
        return Tokens(
            write=tokens_from("token", self.token, self.token_file),
            read=tokens_from("read_token", self.read_token, self.read_token_file),
        )
