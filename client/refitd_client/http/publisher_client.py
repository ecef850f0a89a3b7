"""What a publisher asks the service and tells it, so that both mean the same files.

A root can be emptied under a service that remembers: one in memory is, by each reboot. The service's journal then knows
steps that the run's folder does not know, and a publisher that used them again would publish what no engine takes. So
the publisher asks before its first publication, and begins a new generation.

A publisher can also be given another folder than the service watches. Each root has a name, in `.refitd/id`. The
answer to the publisher's question says it, so that nothing is written into a wrong one, and each notice says it.
"""

import os
from contextlib import suppress
from pathlib import Path

from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER, Order, parse_version_id
from refitd_client.contract.plugin import Receivers
from refitd_client.contract.wire import Problem, VersionPage
from refitd_client.errors import ConflictError, ServiceError
from refitd_client.files.plain_file import read_plain
from refitd_client.http.client import RefitClient
from refitd_client.http.connection import Connection
from refitd_client.http.exchange import RetryPolicy

_TRY = 10.0  # seconds for one request to connect and be answered
_RECEIVERS_SECONDS = 5.0
_FIRST_SECONDS = 10.0  # once in a publisher's life; a service that is down refuses the connection at once
_MAX_NAME_BYTES = 64


def open_client(connection: Connection, *, try_for: float, answers_within: float = 1.0) -> RefitClient:
    """A client that tries again for `try_for` seconds, and no longer. Where that is less than `answers_within`, its one
    try takes so many seconds at most.
    """
    return RefitClient(
        connection.service_url,
        token=connection.token,
        token_file=connection.token_file,
        timeout=min(_TRY, max(try_for, answers_within)),
        retry=RetryPolicy(deadline=try_for),
    )


class ReceiversQuery:
    """The question who can receive a run's versions, which a publisher asks in each of its steps.

    A service that is down would hold each step for as long as it is asked. Once it was found down, by this question or
    by a notice, it is asked once and briefly, until it answers again.
    """

    def __init__(self, connection: Connection, run: str) -> None:
        self.connection, self._run = connection, run

    def ask(self) -> Receivers:
        """Who can receive.

        Raises:
            ServiceError: the service does not say.
            OSError, ValueError: the token file cannot be used.
        """
        reach = self.connection.reach
        was_down, reach.is_down = reach.is_down, True
        with open_client(self.connection, try_for=0.0 if was_down else _RECEIVERS_SECONDS) as client:
            found = client.receivers(self._run)
        reach.is_down = False
        return found


def no_token(error: OSError | ValueError) -> ServiceError:
    """The error for a token file that cannot be read, or holds no token: it may be about to be replaced."""
    return ServiceError(f"the service cannot be asked without its token: {error}")


def newest_known(connection: Connection | None, run: str, root: Path | None = None) -> Order | None:
    """The newest version of a run that the service ever knew, even if all of the run was deleted, or that hosts have
    which follow it. Asks once.

    None if the service knows none, and if it does not answer: then it refuses the notice of a step that was used
    before.

    Raises:
        ConflictError: `root` is given, and the service watches another, or takes no notice of a version.
    """
    if connection is None:
        return None
    try:
        with open_client(connection, try_for=0.0, answers_within=_FIRST_SECONDS) as client:
            page = client.versions(run, limit=1)
    except (ServiceError, OSError, ValueError):
        return None
    if root is not None and (problem := _refusal(root, page)) is not None:
        raise ConflictError(problem)
    known = [Order(each.generation, each.step) for each in page.items[:1]]
    if page.begins is not None:
        known = [Order(page.begins, -1)]  # the run was deleted: any step is after this one
    on_hosts = parse_version_id(page.on_hosts or "")
    return max([*known, *([] if on_hosts is None or on_hosts[0] != run else [on_hosts[1]])], default=None)


def _refusal(root: Path, page: VersionPage) -> Problem | None:
    """What the service would answer a notice with, since it follows another, or watches another root. None where this
    root may be it, as where a folder of the same path has lost its name: that may come back.
    """
    if page.refuses is not None:
        title = "The service takes its versions from an upstream"
        return Problem(type="urn:refitd:problem:run-followed", title=title, status=409, detail=page.refuses)
    if page.root is None or root_name(root) in {page.root, None}:
        return None
    for folder in (root.parent, root, root / SERVICE_FOLDER):
        with suppress(OSError):
            os.listdir(folder)  # a network file system looks again then: the root may have got its name just now
    name = root_name(root)
    if name in {page.root, None} or (name == "" and str(root.resolve()) == page.folder):
        return None
    title = "The service watches another root"
    detail = (
        f"your root is not this service's, which watches {page.folder} (as it is called on the service's host): "
        "publish into that folder, or tell the service that watches yours"
    )
    return Problem(type="urn:refitd:problem:other-root", title=title, status=409, detail=detail)


def root_name(root: Path) -> str | None:
    """The name that the service has given to a root: empty if it has none, None if that cannot be read."""
    try:
        return read_plain(root / SERVICE_FOLDER / ROOT_NAME, _MAX_NAME_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError:
        return None
