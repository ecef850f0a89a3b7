"""refitd's SDK: publish weights, and talk to the service.

>>> from refitd_client import WeightPublisher
>>> with WeightPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
...     publisher.publish(model, step=123).wait()

Importing it imports neither torch nor any part of the service.
"""

from typing import TYPE_CHECKING, Any

from refitd_client.contract.wire import Notice
from refitd_client.delta.plan import DeltaRules
from refitd_client.errors import (
    BucketError,
    ConflictError,
    EngineFailedError,
    Fault,
    InvalidRequestError,
    InvalidWeightsError,
    NameRefusedError,
    NoSpaceError,
    NotFoundError,
    PlanRefusedError,
    PublishError,
    RankLostError,
    RefitError,
    RunBusyError,
    ServiceError,
    ServiceProblemError,
    ServiceUnreachableError,
    StepConflictError,
    StorageError,
    UnauthorizedError,
    UnlabelledAnswerError,
    VersionFailedError,
    VersionLostError,
    VersionRejectedError,
    WaitTimeoutError,
)
from refitd_client.http.client import AsyncRefitClient, RefitClient
from refitd_client.http.exchange import RetryPolicy
from refitd_client.http.verdict import Served
from refitd_client.publish.publication import Publication, StagedPublication
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.sharded import Sharded, ShardedPublisher
from refitd_client.write.version_folder import Progress

if TYPE_CHECKING:
    from refitd_plan import plan

__all__ = [
    "AsyncRefitClient",
    "BucketError",
    "ConflictError",
    "DeltaRules",
    "EngineFailedError",
    "Fault",
    "InvalidRequestError",
    "InvalidWeightsError",
    "NameRefusedError",
    "NoSpaceError",
    "NotFoundError",
    "Notice",
    "PlanRefusedError",
    "Progress",
    "Publication",
    "PublishError",
    "RankLostError",
    "RefitClient",
    "RefitError",
    "RetryPolicy",
    "RunBusyError",
    "Served",
    "ServiceError",
    "ServiceProblemError",
    "ServiceUnreachableError",
    "Sharded",
    "ShardedPublisher",
    "StagedPublication",
    "StepConflictError",
    "StorageError",
    "UnauthorizedError",
    "UnlabelledAnswerError",
    "VersionFailedError",
    "VersionLostError",
    "VersionRejectedError",
    "WaitTimeoutError",
    "WeightPublisher",
    "plan",
]


def __getattr__(name: str) -> Any:
    """`plan` is imported when it is asked for: a trainer that publishes has no need of it."""
    if name != "plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from refitd_plan import plan

    return plan
