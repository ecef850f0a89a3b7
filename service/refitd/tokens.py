"""Bearer tokens (RFC 6750) and where they come from: a variable, or a file with one a line.

Every token of a file opens, so that an old and a new one both do while they are exchanged. A line that cannot be a
token is refused and never skipped: an empty file must not mean that no token is needed.
"""

import hashlib
import hmac
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pydantic import SecretStr

MAX_TOKENS = 16  # each request is compared with all of them
MAX_HOSTS = 4096  # lines of the file of tokens that follow


class TokensRefusedError(ValueError):
    """There is a setting for a token, and no token that can be used. The message names the setting, never a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What opens the service. `write` opens everything, `read` what only looks; without one, looking is open.
    `follow` opens what hosts need that follow: `api/auth.py` has the routes. A line of it may name hosts before the
    token, as `name:token` (`api/auth.py`).
    """

    write: tuple[str, ...] = field(default=(), repr=False)
    read: tuple[str, ...] = field(default=(), repr=False)
    follow: tuple[str, ...] = field(default=(), repr=False)


def is_one_of(given: str, tokens: tuple[str, ...]) -> bool:
    """Return whether `given` is among the tokens, in a time that tells nothing but how many there are.

    Digests are compared, so that lengths are equal, and all of them, so that it does not show which one it was.
    """
    digest = digest_of(given)
    return any([hmac.compare_digest(digest, _known(token)) for token in tokens])  # noqa: C419 - all are compared


def without_names(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(line.rpartition(":")[2] for line in lines)


def names_of(given: str, lines: tuple[str, ...]) -> str | None:
    """The names of hosts in the line of a token; None where it has none."""
    found = [line.rpartition(":")[0] for line in lines if is_one_of(given, (line.rpartition(":")[2],))]
    return next((names for names in found if names), None)


def tokens_from(name: str, secret: SecretStr | None, file: Path | None, most: int = MAX_TOKENS) -> tuple[str, ...]:
    """Return the tokens of a setting: of its file where there is one, else of its variable. Reads the file.

    Raises:
        TokensRefusedError: it is set and holds no token, or something that cannot be one.
        OSError: the file cannot be read.
    """
    if file is not None:
        where = f"the token file {file} (REFITD_{name.upper()}_FILE)"
        try:
            text = file.read_text()
            if most > MAX_TOKENS:
                _check_lines(text, where)
            return _parse(text, where, most)
        except UnicodeDecodeError:
            raise TokensRefusedError(f"{where} is no text") from None
    if secret is None:
        return ()
    return _parse(secret.get_secret_value(), f"REFITD_{name.upper()}", most)


def _check_lines(text: str, where: str) -> None:
    """Check lines that may name hosts: each has a token, and no two have the same."""
    lines_of: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (said := line.strip()):
            continue
        names, _, token = said.rpartition(":")
        if not token:
            raise TokensRefusedError(f"{where}: line {number} ({names}:) has no token: write name:token")
        if (first := lines_of.setdefault(token, number)) != number:
            raise TokensRefusedError(f"{where}: lines {first} and {number} have the same token: give each its own")


def _parse(text: str, where: str, most: int) -> tuple[str, ...]:
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise TokensRefusedError(f"{where} is empty: put a token into it, or leave the setting out")
    if len(tokens) > most:
        raise TokensRefusedError(f"{where} has {len(tokens)} lines, more than {most}: one token a line")
    if not all(token.isascii() and token.isprintable() and " " not in token for token in tokens):
        raise TokensRefusedError(f"{where} holds characters that a bearer token cannot have: one token a line")
    return tokens


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


_known = lru_cache(maxsize=2 * MAX_HOSTS)(digest_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontTokens:
    """Where the tokens that open the front come from. With neither, it is open to all that reach it."""

    file: Path | None = None
    secret: SecretStr | None = None

    @property
    def are_set(self) -> bool:
        return self.file is not None or self.secret is not None

    def read(self) -> Tokens:
        """The tokens, which open what only looks as well."""
        tokens = tokens_from("front_token", self.secret, self.file)
        return Tokens(write=tokens, read=tokens)
