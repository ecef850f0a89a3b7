"""Signatures by Standard Webhooks (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md).

    signed      {webhook-id}.{webhook-timestamp}.{body}
    signature   "v1," and base64 of HMAC-SHA256; one for each secret, separated by spaces, while secrets are exchanged

A receiver holds the signature against its secret, and the timestamp against its clock, so that nothing old is believed.
"""

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

PREFIX = "whsec_"
LEAST_BYTES, MOST_BYTES = 24, 64  # of a secret, by the convention
MAX_SECRETS = 4


class SecretRefusedError(ValueError):
    """The file holds no secret that can be used; the message says what is wrong."""


def read_secrets(file: Path) -> tuple[bytes, ...]:
    """The secrets in a file, one a line; the first is the newest.

    Raises:
        SecretRefusedError: it holds none, too many, or something else.
        OSError: it cannot be read.
    """
    try:
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise SecretRefusedError(f"{file} is no text") from None
    if not 1 <= len(lines) <= MAX_SECRETS:
        raise SecretRefusedError(f"{file} holds {len(lines)} secrets: it takes 1 to {MAX_SECRETS}, one a line")
    return tuple(_secret(line, file) for line in lines)


def _secret(line: str, file: Path) -> bytes:
    how = f"make one: echo {PREFIX}$(head -c 32 /dev/urandom | base64)"
    if not line.startswith(PREFIX):
        raise SecretRefusedError(f"{file} holds a line that does not begin with {PREFIX}; {how}")
    try:
        secret = base64.b64decode(line.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise SecretRefusedError(f"{file} holds a secret that is not base64 behind {PREFIX}; {how}") from None
    if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
        raise SecretRefusedError(
            f"{file} holds a secret of {len(secret)} bytes, and it takes {LEAST_BYTES} to {MOST_BYTES}; {how}"
        )
    return secret


def headers_of(secrets: tuple[bytes, ...], id_: str, timestamp: int, body: str) -> dict[str, str]:
    """The headers of one try to send `body`; `timestamp` is in seconds since 1970, of this try."""
    signed = f"{id_}.{timestamp}.{body}".encode()
    signatures = [base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode() for secret in secrets]
    return {
        "content-type": "application/json",
        "webhook-id": id_,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }
