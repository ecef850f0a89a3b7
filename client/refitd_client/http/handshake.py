"""What the service knows of a run and a root, and the publisher asks for or says, so that the two mean the same files.

A root can be emptied under a service that remembers: one in memory is, by each reboot. The service's journal then knows
of steps that the run's folder knows nothing of, and a publisher that used them again would publish what nobody takes.
It asks before its first publication, and begins a new generation.

A publisher can also be given another folder than the service watches. Each root has a name, in `.refitd/id`, that
notices say.
"""

from pathlib import Path

from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER, Order
from refitd_client.errors import ServiceError
from refitd_client.files.plain_file import read_plain
from refitd_client.http.client import open_client
from refitd_client.http.connection import Connection

_LONGEST = 64  # bytes


def newest_known(connection: Connection | None, run: str) -> Order | None:
    """The newest of a run that the service ever knew, also where all of it was deleted. Asks once.

    None where it knows none, and where it does not answer: then the notice is refused if a step was used before.
    """
    if connection is None:
        return None
    try:
        with open_client(connection, try_for=0.0) as client:
            newest = client.versions(run, limit=1).items
    except (ServiceError, OSError, ValueError):
        return None
    return Order(newest[0].generation, newest[0].step) if newest else None


def name_of(root: Path) -> str | None:
    """The name that the service has given to a root: empty where it has none, None where that cannot be told."""
    try:
        return read_plain(root / SERVICE_FOLDER / ROOT_NAME, _LONGEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError:
        return None
