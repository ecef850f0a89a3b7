"""Everything that this package raises, split by whose fault it is.

    RefitError
    ├── PublishError                    nothing became visible
    │   ├── InvalidWeightsError         trainer: what it passed cannot be a version
    │   ├── NameRefusedError            trainer: a run name or a step that cannot be one
    │   ├── StepConflictError           trainer: the step was published before
    │   ├── RunBusyError                trainer: another publisher has the run
    │   ├── TransportRefusedError       trainer: a transport that cannot work with these engines
    │   ├── RankLostError               trainer: a rank of a sharded publication is gone or late
    │   └── StorageError                storage: the file system would not
    │       ├── NoSpaceError
    │       └── BucketError             storage: the object store would not, or was not there
    ├── VersionFailedError              checkpoint: it is not, or no longer, fit to be served
    │   ├── VersionRejectedError
    │   └── VersionLostError
    ├── EngineFailedError               engine: the version is good and engines did not take it
    ├── UnlabelledAnswerError           engine: an answer that does not say which version generated it
    ├── PlanRefusedError                trainer: a plan whose inputs contradict each other
    ├── WaitTimeoutError                engine or service, by which of them is late
    └── ServiceError
        ├── ServiceUnreachableError     service: no answer, or none that refitd gives
        └── ServiceProblemError         service: it answered with a problem document (RFC 9457)
            ├── UnauthorizedError       trainer: the token is missing, wrong or not enough (401, 403)
            ├── NotFoundError           trainer: the service knows no such thing (404)
            ├── ConflictError           trainer: it contradicts what the service knows (409)
            └── InvalidRequestError     trainer: the request is refused as it is (other 4xx)

Each survives pickling, because trainers send exceptions between processes.
"""

import errno
from enum import StrEnum
from typing import Any

from refitd_client.contract import naming
from refitd_client.contract.wire import EngineOnVersion, Problem

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The kernel's errors if there is no room, or a quota is used up."""


class Fault(StrEnum):
    """The part that has to change before the same call can succeed."""

    TRAINER = "trainer"
    CHECKPOINT = "checkpoint"
    ENGINE = "engine"
    SERVICE = "service"
    STORAGE = "storage"


class RefitError(Exception):
    """A failure: a sentence that names it and says what to do. `fault` says which part has to change."""

    fault: Fault = Fault.SERVICE


class PublishError(RefitError):
    """The publisher refused or failed. No version became visible, and the step can be published again."""

    fault: Fault = Fault.TRAINER


class InvalidWeightsError(PublishError):
    """What was passed cannot be a version. `tensor` names the first tensor that cannot, if it is about one."""

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class NameRefusedError(PublishError, naming.InvalidNameError):
    """A run name or a step that cannot be one."""


class TransportRefusedError(PublishError):
    """The transport that was asked for cannot work between this trainer and these engines. Nothing was sent."""


class StepConflictError(PublishError):
    """The step is not after the last one of this publisher, or its directory exists."""


class RunBusyError(PublishError):
    """Another publisher has the run: process `pid` on `host`, if its lock file names them."""

    def __init__(self, message: str, *, pid: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.pid = pid
        self.host = host


class RankLostError(PublishError):
    """Rank `rank` of a sharded publication died, or did not come or answer in time."""

    def __init__(self, message: str, *, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class StorageError(PublishError):
    """The file system refused. `__cause__` is the OSError."""

    fault: Fault = Fault.STORAGE


class NoSpaceError(StorageError):
    """The file system is full, or a quota is used up. `needed` and `free` are bytes."""

    def __init__(self, message: str, *, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free


class BucketError(StorageError):
    """The object store refused, or could not be reached. `may_heal`: the same call can succeed later.

    The store's own text is not in it: that can hold credentials.
    """

    def __init__(self, message: str, *, may_heal: bool = False) -> None:
        super().__init__(message)
        self.may_heal = may_heal


class VersionFailedError(RefitError):
    """The version will not be served, or not any more. The message has the service's reason."""

    fault: Fault = Fault.CHECKPOINT


class VersionRejectedError(VersionFailedError):
    """The service proved the checkpoint bad. No engine was sent it."""


class VersionLostError(VersionFailedError):
    """The version was good, and its files have changed or gone."""


class EngineFailedError(RefitError):
    """Engines did not take a good version. `engines` are those, each with its reason."""

    fault: Fault = Fault.ENGINE

    def __init__(self, message: str, *, engines: tuple[EngineOnVersion, ...] = ()) -> None:
        super().__init__(message)
        self.engines = engines


class UnlabelledAnswerError(RefitError, ValueError):
    """An engine's answer does not say which version generated which of its tokens."""

    fault: Fault = Fault.ENGINE


class PlanRefusedError(RefitError, ValueError):
    """A plan's inputs contradict each other, the machine or the model. The message says what and where."""

    fault: Fault = Fault.TRAINER


class WaitTimeoutError(RefitError):
    """The wait is over and the update is not; it goes on. `laggards` are the engines it waits for."""

    def __init__(self, message: str, *, laggards: tuple[EngineOnVersion, ...] = ()) -> None:
        super().__init__(message)
        self.laggards = laggards
        self.fault = Fault.ENGINE if laggards else Fault.SERVICE


class ServiceError(RefitError):
    """The service did not answer, or refused. `publication` is the version that is on disk all the same, if any."""

    publication: Any = None  # a `Publication`, whose module imports this one


class ServiceUnreachableError(ServiceError):
    """No answer came, or one that no refitd service gives. Whether the request was carried out is not known."""


class ServiceProblemError(ServiceError):
    """The service answered with a problem document."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        """The problem in one line, and where the version stands, if it does."""
        text = f"{self.problem.title}: {self.problem.detail} (HTTP {self.problem.status}, {self.problem.slug})"
        return text if self.publication is None else f"{text}; the version stands at {self.publication.path}"


class UnauthorizedError(ServiceProblemError):
    """The token is missing, wrong or not enough."""

    fault: Fault = Fault.TRAINER


class NotFoundError(ServiceProblemError):
    """The service knows no such version, engine or run."""

    fault: Fault = Fault.TRAINER


class ConflictError(ServiceProblemError):
    """The request contradicts what the service knows, such as other content for the same step."""

    fault: Fault = Fault.TRAINER


class InvalidRequestError(ServiceProblemError):
    """The service refuses the request as it is."""

    fault: Fault = Fault.TRAINER


_BY_STATUS: dict[int, type[ServiceProblemError]] = {
    401: UnauthorizedError,
    403: UnauthorizedError,
    404: NotFoundError,
    409: ConflictError,
}
_BY_SLUG: dict[str, type[ServiceProblemError]] = {
    "engine-not-allowed": InvalidRequestError,  # a 403 that no token changes
}
_TRANSIENT = frozenset({408, 425, 429})


def problem_error(problem: Problem) -> ServiceProblemError:
    """The error for a problem document, by its status. One that may pass by itself stays the service's fault."""
    if problem.slug in _BY_SLUG:
        return _BY_SLUG[problem.slug](problem)
    if problem.status in _BY_STATUS:
        return _BY_STATUS[problem.status](problem)
    is_refusal = 400 <= problem.status < 500 and problem.status not in _TRANSIENT
    return InvalidRequestError(problem) if is_refusal else ServiceProblemError(problem)
