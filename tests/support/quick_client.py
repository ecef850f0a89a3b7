"""A client that does not wait long before it asks again."""

from collections.abc import Callable
from typing import Any

from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy

QUICK = RetryPolicy(deadline=20.0, first_pause=0.001, longest_pause=0.01)

Use = Callable[[Any], Any]


def run(url: str | None, use: Use, **options: Any) -> Any:
    """Use a `RefitClient`."""
    with RefitClient(url, **{"retry": QUICK, **options}) as client:
        return use(client)
