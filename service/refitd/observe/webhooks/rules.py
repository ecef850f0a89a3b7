"""What the settings say about webhooks, and the secrets that sign them. Imports no store: commands import this."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from refitd.text import is_web_address

PREFIX = "whsec_"
LEAST_BYTES, MOST_BYTES = 24, 64  # of a secret, by the convention
MAX_SECRETS = 4


class Topic(StrEnum):
    """A kind of event that webhooks report."""

    SERVED = "served"  # a version is proved on every reachable engine of its run, for the first time
    REJECTED = "rejected"  # a version is proved bad, or its files are lost
    DEGRADED = "degraded"  # a version is served, and engines were left behind
    STALLED = "stalled"  # for a while no version was served, though there is one

    @property
    def message_type(self) -> str:
        """The `type` of its messages, as `version.served`."""
        subject = "version" if self in {Topic.SERVED, Topic.REJECTED} else "rollout"
        return f"{subject}.{self}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRules:
    """Which receivers get which topics.

    Attributes:
        receivers: URLs.
        secret_file: the file with the secrets that requests are signed by; None where there are no receivers.
        topics: the events that are reported.
        stalled_after: seconds after which a rollout that has not ended is news.
    """

    receivers: Sequence[str] = ()
    secret_file: Path | None = None
    topics: Sequence[Topic] = ()
    stalled_after: float


def check_receivers(urls: list[str]) -> list[str]:
    """Return URLs of receivers. Raises ValueError, which repeats no URL: they may be secret."""
    for url in urls:
        if not is_web_address(url) or urlsplit(url).username or urlsplit(url).fragment:
            raise ValueError("a webhook's URL is http:// or https://, with a host, and without user or fragment")
    if len(urls) != len(set(urls)):
        raise ValueError("the same URL twice would be told everything twice")
    return urls


def read_receivers(file: Path) -> list[str]:
    """Return the URLs in a file, one a line; lines that begin with # are left out.

    Raises:
        ValueError: it names none, or is no text.
        OSError: it cannot be read.
    """
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"the webhooks file {file} is no text") from None
    urls = [line for line in lines if line and not line.startswith("#")]
    if not urls:
        raise ValueError(f"the webhooks file {file} names no URL: write one a line")
    return urls


class WebhookSecretError(ValueError):
    """The file holds no secret that can be used; the message says what is wrong."""


def check_signing(secret_file: Path | None, topics: Sequence[Topic]) -> None:
    """Refuse webhooks that would not be signed, or would report nothing.

    Raises:
        ValueError: the message says which flag is at fault.
    """
    if secret_file is None:
        raise ValueError("--webhook needs --webhook-secret-file (REFITD_WEBHOOK_SECRET_FILE): they are signed")
    if not topics:
        raise ValueError("--webhook-events (REFITD_WEBHOOK_EVENTS) is empty: then nothing would be told")
    try:
        read_secrets(secret_file)
    except OSError as error:
        raise ValueError(f"the secret file {error.filename} cannot be read: {error.strerror}") from error


def read_secrets(file: Path) -> tuple[bytes, ...]:
    """Return the secrets in a file, one a line, the newest first.

    Raises:
        WebhookSecretError: it holds none, too many, or something else.
        OSError: it cannot be read.
    """
    try:
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise WebhookSecretError(f"{file} is no text") from None
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise WebhookSecretError(f"{file} holds {len(lines)} secrets: it takes 1 to {MAX_SECRETS}, one a line")
    return tuple(_secret(line, file) for line in lines)


def _secret(line: str, file: Path) -> bytes:
    how = f"make one: echo {PREFIX}$(head -c 32 /dev/urandom | base64)"
    if not line.startswith(PREFIX):
        raise WebhookSecretError(f"{file} holds a line that does not begin with {PREFIX}; {how}")
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise WebhookSecretError(f"{file} holds a secret that is not base64 behind {PREFIX}; {how}") from None
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise WebhookSecretError(
            f"{file} holds a secret of {len(secret)} bytes, and it takes {LEAST_BYTES} to {MOST_BYTES}; {how}"
        )
    return secret
