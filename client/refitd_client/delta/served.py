"""The service is asked what engines serve: it is what a delta has to lead from."""

from refitd_client.connection import Connection
from refitd_client.delta.plan import Full, last_served
from refitd_client.errors import ServiceError
from refitd_client.publication import open_client

# Seconds for the service to say what engines serve. After them a version goes out in full.
BASE_DEADLINE = 1.0


def ask_base(connection: Connection | None, run: str) -> str | Full:
    """The id of the version to lead from, or why a version has to go out in full."""
    if connection is None:
        return Full("the publisher was opened without service_url, so nobody says what engines serve")
    try:
        with open_client(connection, try_for=BASE_DEADLINE) as client:
            newest = client.versions(run, limit=1).items
            if newest and newest[0].needs_full:
                return Full(f"{newest[0].id} cannot be carried out: {newest[0].reason}")
            return last_served(client.engines().items, run)
    except (ServiceError, OSError, ValueError) as error:
        return Full(f"the service did not say what engines serve: {error}")
