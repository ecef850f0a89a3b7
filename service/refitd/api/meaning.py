"""What states and outcomes mean, in words that go on after a colon."""

from collections.abc import Mapping
from typing import assert_never

from refitd.engine.port import Outcome
from refitd.state.records import NOT_SENT, AttemptRecord
from refitd_client.contract.states import EngineState, VersionState

_ENDED: Mapping[str, str] = {
    Outcome.ACK.name: "went well: what it loaded was proved",
    Outcome.NACK.name: "was refused, which left it as it was",
    Outcome.TAINTED.name: "broke off in the middle, which left contents that nobody can vouch for",
    Outcome.UNREACHABLE.name: "did not come about, because it could not be reached",
    NOT_SENT: "did not come about: nothing was sent",
}

_ENGINES: Mapping[EngineState, str] = {
    EngineState.PROBING: "it has not answered yet",
    EngineState.IN_SYNC: "it serves what it should",
    EngineState.BEHIND: "it serves something older than it should",
    EngineState.UPDATING: "it loads a version",
    EngineState.VERIFYING: "it has loaded a version, and its contents are being checked",
    EngineState.NACKED: "it refused the version, and is proved to serve what it served before",
    EngineState.TAINTED: "its contents are unknown",
    EngineState.UNREACHABLE: "it does not answer, is asked again and again, and is brought up to date when it does",
    EngineState.QUARANTINED: (
        "it could not be repaired, and is left alone until it is restarted or a resync is asked for"
    ),
    EngineState.CONTESTED: (
        "another writer loads weights into it, so nothing is loaded for a while, and in the end not at all"
    ),
}


def ended(attempt: AttemptRecord) -> str:
    """How a load has ended, if it has."""
    return _ENDED.get(attempt.outcome or "", "is under way")


def version_meaning(state: VersionState) -> str:
    """What a version's state says of it."""
    match state:
        case VersionState.ANNOUNCED:
            return "nobody has looked at its files yet"
        case VersionState.SETTLING:
            return "it is being written, as far as anyone can tell"
        case VersionState.VALIDATING:
            return "its files are being checked"
        case VersionState.SEALED:
            return "its files were checked and are good"
        case VersionState.RETIRED:
            return "nobody needs it: its files are being deleted"
        case VersionState.DELETED:
            return "its files were deleted"
        case VersionState.REJECTED:
            return "its files are not good, and no engine loads it"
        case VersionState.UNKNOWN:
            return "its files could not be read: this is tried again"
        case VersionState.LOST:
            return "its files have changed or gone since they were checked"
        case _:
            assert_never(state)


def engine_meaning(state: EngineState) -> str:
    """What an engine's state says of it."""
    return _ENGINES[state]
