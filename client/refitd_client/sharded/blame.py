"""An error of one rank, told on all of them: the same class where a caller may want to tell it apart, and the rank."""

import pickle

from refitd_client.errors import (
    NO_SPACE,
    InvalidWeightsError,
    NoSpaceError,
    PublishError,
    RankLostError,
    ServiceError,
    StorageError,
)


def of_rank(rank: int, error: Exception) -> PublishError:
    """The error that every rank raises for what happened on one."""
    text = f"rank {rank}: {error}"
    match error:
        case InvalidWeightsError():
            return InvalidWeightsError(text, tensor=error.tensor)
        case NoSpaceError():
            return NoSpaceError(text, needed=error.needed, free=error.free)
        case RankLostError():
            return RankLostError(text, rank=error.rank)
        case OSError() if error.errno in NO_SPACE:
            return NoSpaceError(f"{text}: free some, or let the service keep fewer versions")
        case OSError() | StorageError():
            return StorageError(text)
        case PublishError():
            return PublishError(text)
        case _:
            return PublishError(f"rank {rank} failed with {type(error).__name__}: {error}")


def portable(error: BaseException) -> Exception:
    """An error that can be sent to another process."""
    said = PublishError(f"{type(error).__name__}: {error}")
    if not isinstance(error, Exception):
        return said
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else said  # noqa: S301 our own bytes
    except Exception:  # whatever a foreign class makes of being pickled
        return said


def as_service_error(error: ServiceError) -> ServiceError:
    """One that can be sent, without the version that it speaks of: each rank has its own view of that."""
    sent = portable(error)
    if not isinstance(sent, ServiceError):
        return ServiceError(str(error))
    sent = pickle.loads(pickle.dumps(sent))  # noqa: S301 our own bytes
    sent.publication = None
    return sent
