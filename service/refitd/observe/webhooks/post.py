"""Sends one message over HTTP: no redirects, no proxies of the environment, and an end to patience."""

import asyncio
import ssl
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

import httpx

from refitd.observe.webhooks.signature import SecretRefusedError, headers_of, read_secrets
from refitd.state.delivery import DeliveryRecord, Sent

SEND_SECONDS = 20.0


class Post(Protocol):
    """What the courier asks of the network."""

    async def __call__(self, delivery: DeliveryRecord) -> Sent:
        """Try once. Raises nothing for what a receiver or the network does."""
        ...


class SignedPost:
    """Signs with the secrets that the file holds now, so that they can be exchanged while the service runs."""

    def __init__(self, secret_file: Path) -> None:
        self._secret_file = secret_file

    async def __call__(self, delivery: DeliveryRecord) -> Sent:
        """See `Post`."""
        try:
            secrets = await asyncio.to_thread(read_secrets, self._secret_file)
        except (OSError, SecretRefusedError) as error:
            return Sent(trouble=f"it cannot be signed: {error}")
        headers = headers_of(secrets, delivery.id, int(time.time()), delivery.body)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                return await _send(delivery, headers)
        except TimeoutError:
            return Sent(trouble=f"there was no answer within {SEND_SECONDS:g} s")


async def _send(delivery: DeliveryRecord, headers: Mapping[str, str]) -> Sent:
    tls = await asyncio.to_thread(_certificates) if delivery.url.startswith("https") else False
    try:
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=SEND_SECONDS, verify=tls) as http,
            http.stream("POST", delivery.url, content=delivery.body, headers=headers) as reply,
        ):  # what it says beside its status is not read: nobody would look at it
            return Sent(status=reply.status_code, retry_after=_seconds(reply.headers.get("retry-after")))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Sent(trouble=f"it cannot be reached: {str(error) or type(error).__name__}")


@cache
def _certificates() -> ssl.SSLContext:
    """The system's. They take 20 ms to read, and are read once."""
    return ssl.create_default_context()


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
