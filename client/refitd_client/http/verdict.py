"""What the service's answer to a wait means for the trainer. Pure: a good end is returned, any other is raised."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from refitd_client.contract.wire import EngineOnVersion, Version, WaitResult
from refitd_client.errors import (
    EngineFailedError,
    RefitError,
    VersionFailedError,
    VersionLostError,
    VersionRejectedError,
    WaitTimeoutError,
)

_ENGINES_NAMED = 3  # engines that an error names; `laggards` has all of them
_ROLLED_BACK = "it was rolled back from; what the trainer publishes next is served as usual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a wait ended well. `outcome` is served, sealed or superseded; `engines` are those of the run, also those that
    do not answer: `state` and `version` say how each is and what it serves.
    """

    outcome: WaitOutcome
    engines: list[EngineOnVersion]
    version: Version


def judge(result: WaitResult, waited: float, digest: str | None = None) -> Served:
    """Return how a wait ended, if it ended well.

    Args:
        result: the service's answer.
        waited: seconds that the wait took.
        digest: the digest of what was published, if the caller knows it.

    Raises:
        VersionFailedError: the version will not be served, or the service knows other content by its name.
        EngineFailedError: the version is good, and engines did not take it.
        WaitTimeoutError: the wait is over, and the update is not.
    """
    version = result.version
    is_other = digest is not None and version.digest is not None and version.digest != digest
    if is_other and result.outcome is not WaitOutcome.FAILED:
        raise VersionFailedError(
            f"the service knows {version.id} with other content ({version.digest}) than was published ({digest}): it "
            "watches another root, or remembers the run from before its root was emptied; a new publisher begins a "
            "new generation"
        )
    match result.outcome:
        case WaitOutcome.SERVED | WaitOutcome.SEALED | WaitOutcome.TAKEN | WaitOutcome.SUPERSEDED:
            return Served(outcome=result.outcome, engines=version.engines, version=version)
        case WaitOutcome.FAILED:
            raise _failure(version)
        case WaitOutcome.PENDING:
            raise _timeout(version, waited)
        case _:
            assert_never(result.outcome)


def _failure(version: Version) -> RefitError:
    reason = version.reason or "the service gives no reason"
    if version.state is VersionState.REJECTED:
        return VersionRejectedError(f"version {version.id} was rejected and no engine has seen it: {reason}")
    if version.barred:
        return VersionFailedError(f"version {version.id} will not be served: {version.reason or _ROLLED_BACK}")
    if version.state is VersionState.LOST:
        return VersionLostError(f"version {version.id} was good, and its files have changed or gone: {reason}")
    failed = tuple(engine for engine in version.engines if engine.state.is_in_trouble)
    if not failed:
        return VersionFailedError(f"version {version.id} will not be served: {reason}")
    return EngineFailedError(
        f"version {version.id} is good, and engines did not take it: {_states_of(failed, version)}", engines=failed
    )


def _timeout(version: Version, waited: float) -> WaitTimeoutError:
    if version.state.is_open:
        reason = f" ({version.reason})" if version.reason else ""
        failed = tuple(engine for engine in version.engines if engine.state.is_in_trouble)
        states = f"; {_states_of(failed, version)}" if failed else ""
        return WaitTimeoutError(
            f"version {version.id} is still {version.state} after {waited:g} s{reason}{states}", laggards=failed
        )
    late = tuple(engine for engine in version.engines if engine.state is not EngineState.IN_SYNC or not engine.serves)
    laggards = _states_of(late, version) or "no engine of the run is known to the service"
    return WaitTimeoutError(
        f"version {version.id} is not served after {waited:g} s, waiting for: {laggards}", laggards=late
    )


def _states_of(engines: Iterable[EngineOnVersion], version: Version) -> str:
    """Say where a few of the engines are, those that are not in sync first, and count the others."""
    ordered = sorted(engines, key=lambda engine: engine.state is EngineState.IN_SYNC)
    more = len(ordered) - _ENGINES_NAMED
    few = "; ".join(_state_of(engine, version) for engine in ordered[:_ENGINES_NAMED])
    return few + (f"; and {more:,} more" if more > 0 else "")


def _state_of(engine: EngineOnVersion, version: Version) -> str:
    reason = f" ({engine.reason})" if engine.reason else ""
    is_on_other = engine.state is EngineState.IN_SYNC and engine.version not in (None, version.id)
    return f"{engine.id} is {engine.state}{reason}" + (f", and serves {engine.version}" if is_on_other else "")
