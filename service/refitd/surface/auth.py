"""Bearer tokens (RFC 6750) on everything that changes anything. Without a token the service is on loopback only."""

import asyncio
import hmac
from typing import Annotated

from fastapi import Header

from refitd.problem import Kind, ProblemError
from refitd.surface.context import ServiceOf


async def authorize(service: ServiceOf, authorization: Annotated[str | None, Header()] = None) -> None:
    """Let a request pass that carries the token. The token is read each time, so that a file can be rotated.

    Raises:
        ProblemError: the token is missing or wrong, or the token file cannot be read.
    """
    try:
        token = await asyncio.to_thread(service.settings.read_token)
    except OSError as error:
        raise ProblemError(Kind.NOT_READY, f"the service cannot read its token file: {error.strerror}") from error
    if token is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        missing = "send 'Authorization: Bearer …'" if authorization is None else "it is not the service's token"
        raise ProblemError(Kind.UNAUTHORIZED, f"this changes something and needs the bearer token: {missing}")
