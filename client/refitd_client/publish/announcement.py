"""The service is told of a version that stands. It would find it by itself, a little later."""

import logging
from dataclasses import replace

from refitd_client.contract.wire import Notice
from refitd_client.errors import Fault, ServiceError
from refitd_client.http.client import no_token, open_client
from refitd_client.http.connection import Connection
from refitd_client.publish.publication import Publication
from refitd_client.write.progress import Laps

# Seconds in which new tries to send the notice begin; the last may take as long again.
NOTICE_DEADLINE = 2.5

_log = logging.getLogger("refitd_client")


def announce(publication: Publication) -> Publication:
    """Send the notice. What comes back knows how that went.

    Raises:
        ServiceProblemError: the service refuses the notice; what came of it is the error's `publication`.
    """
    laps = Laps()
    with laps.lap("notice"):
        error = _tell(publication.connection, publication.notice)
    announced = replace(publication, timings=publication.timings | laps.times, notice_error=error)
    if error is not None:
        _report(error, announced)
    return announced


def _tell(connection: Connection | None, notice: Notice) -> ServiceError | None:
    if connection is None:
        return None
    try:
        with open_client(connection, try_for=NOTICE_DEADLINE) as client:
            client.announce(notice)
    except ServiceError as error:
        return error
    except (OSError, ValueError) as error:
        return no_token(error)
    return None


def _report(error: ServiceError, publication: Publication) -> None:
    error.publication = publication
    if error.fault is Fault.TRAINER:
        raise error
    _log.warning("%s is published, but the service was not told (%s); it will find it", publication.version_id, error)
