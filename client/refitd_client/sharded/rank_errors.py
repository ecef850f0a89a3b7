"""What ranks say of an error on one of them."""

import re
from collections.abc import Collection

from refitd_client.errors import (
    NO_SPACE,
    InvalidWeightsError,
    NoSpaceError,
    PublishError,
    RankLostError,
    StorageError,
)

_SOURCE = re.compile(r"^\[[^\]\s]*\]\s*")
_TORCH_ADVICE = re.compile(r"[.\s]*(This is typically|This means|Check the logs|GLHF).*")


def ranks_named(ranks: Collection[int]) -> str:
    """Some ranks, as a sentence names them: `rank 1`, `ranks 0, 1 and 3`."""
    *most, last = (str(rank) for rank in sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def reason_of(error: RuntimeError) -> str:
    """What gloo says of a connection, without its line of source and its advice to gloo's developers."""
    first = (str(error).splitlines() or [""])[0]
    return _TORCH_ADVICE.sub("", _SOURCE.sub("", first)) or type(error).__name__


def error_of_rank(rank: int, error: Exception) -> PublishError:
    """The error that every rank raises for an error on one."""
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


def argument_error_of_rank(rank: int, error: Exception) -> Exception:
    """The error that every rank raises for arguments that cannot be on one: of the class that one rank would raise."""
    text = f"rank {rank}: {error}"
    match error:
        case TypeError():
            return TypeError(text)
        case ValueError():
            return ValueError(text)
        case _:
            return error_of_rank(rank, error)
