"""Runs the same calls through the blocking and the asyncio client, so that neither can drift from the other."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from refitd_client.http.client import AsyncRefitClient, RefitClient
from refitd_client.http.exchange import RetryPolicy

QUICK = RetryPolicy(deadline=20.0, first_pause=0.001, longest_pause=0.01)

Use = Callable[[Any], Any]
Run = Callable[..., Any]


def run_blocking(url: str | None, use: Use, **options: Any) -> Any:
    """Use a `RefitClient`."""
    with RefitClient(url, **{"retry": QUICK, **options}) as client:
        return use(client)


def run_async(url: str | None, use: Use, **options: Any) -> Any:
    """Use an `AsyncRefitClient`: what `use` returns is awaited."""

    async def go() -> Any:
        async with AsyncRefitClient(url, **{"retry": QUICK, **options}) as client:
            result = use(client)
            return await result if inspect.isawaitable(result) else result

    return asyncio.run(go())
