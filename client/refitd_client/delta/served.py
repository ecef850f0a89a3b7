"""The service is asked what engines serve: it is what a delta has to lead from."""

import time
from collections.abc import Callable
from threading import Thread

from refitd_client.delta.plan import Full, last_served
from refitd_client.errors import ServiceError
from refitd_client.http.client import open_client
from refitd_client.http.connection import Connection

# Seconds for the service to say what engines serve, from the begin of the comparison on. After them a version goes out
# in full. Each of the two requests is tried for as long, in a thread that may outlive the question.
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


class Asked:
    """The question on its way, while the weights are compared."""

    def __init__(self, ask: Callable[[], str | Full]) -> None:
        """Ask, in a thread of its own."""
        self._ask = ask
        self._answer: str | Full = Full("nobody answered")
        self._failure: BaseException | None = None
        self._ends = time.monotonic() + BASE_DEADLINE
        self._thread = Thread(target=self._run, name="refitd-base", daemon=True)
        self._thread.start()

    def answer(self) -> str | Full:
        """Wait for the answer, as long as there is time. Raises what asking raised."""
        self._thread.join(max(0.0, self._ends - time.monotonic()))
        if self._thread.is_alive():
            return Full(f"the service did not say what engines serve within {BASE_DEADLINE:g} s")
        if self._failure is not None:
            raise self._failure
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except BaseException as error:  # raised where it was asked
            self._failure = error
