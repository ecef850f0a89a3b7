"""refitd's SDK: publish weights, and talk to the service.

>>> from refitd_client import WeightPublisher
>>> with WeightPublisher("/shared/weights", "exp/trial", "http://127.0.0.1:8700") as publisher:
...     publisher.publish(model, step=123).wait()

Importing it imports neither torch nor any part of the service; a name's module is imported when the name is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refitd_client.contract.wire import EngineOnVersion, Notice
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
        TransportRefusedError,
        UnauthorizedError,
        UnlabelledAnswerError,
        VersionFailedError,
        VersionLostError,
        VersionRejectedError,
        WaitTimeoutError,
    )
    from refitd_client.http.client import RefitClient
    from refitd_client.http.exchange import RetryPolicy, Served
    from refitd_client.publish.options import DeltaRules, PublishOptions, Sharded
    from refitd_client.publish.publication import Handed, Publication
    from refitd_client.publisher import WeightPublisher
    from refitd_client.write.version_folder import Progress

__all__ = [
    "BucketError",
    "ConflictError",
    "DeltaRules",
    "EngineFailedError",
    "EngineOnVersion",
    "Fault",
    "Handed",
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
    "PublishOptions",
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
    "StepConflictError",
    "StorageError",
    "TransportRefusedError",
    "UnauthorizedError",
    "UnlabelledAnswerError",
    "VersionFailedError",
    "VersionLostError",
    "VersionRejectedError",
    "WaitTimeoutError",
    "WeightPublisher",
]


_PLACES = {
    "EngineOnVersion": "refitd_client.contract.wire",
    "Notice": "refitd_client.contract.wire",
    "DeltaRules": "refitd_client.publish.options",
    "RefitClient": "refitd_client.http.client",
    "RetryPolicy": "refitd_client.http.exchange",
    "Served": "refitd_client.http.exchange",
    "Publication": "refitd_client.publish.publication",
    "PublishOptions": "refitd_client.publish.options",
    "WeightPublisher": "refitd_client.publisher",
    "Sharded": "refitd_client.publish.options",
    "Handed": "refitd_client.publish.publication",
    "Progress": "refitd_client.write.version_folder",
}
"""The module of each name that is no error."""


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES.get(name, "refitd_client.errors")), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
