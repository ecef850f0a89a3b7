"""How errors end a command: an exit code for scripts and a problem document (RFC 9457) for machines. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from refitd_client.contract.wire import Problem
from refitd_client.errors import (
    EngineFailedError,
    PlanRefusedError,
    PublishError,
    RefitError,
    ServiceProblemError,
    ServiceUnreachableError,
    UnauthorizedError,
    VersionFailedError,
    WaitTimeoutError,
)


class ExitCode(IntEnum):
    """The exit codes of every command. 130 is an interrupt (Ctrl-C), as in every shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNAUTHORISED = 4
    TIMED_OUT = 5


_HINTS: Mapping[ExitCode, str] = {
    ExitCode.UNREACHABLE: "Is it running ('refitd serve'), and is this its address? Say --url, or set REFITD_URL.",
    ExitCode.UNAUTHORISED: "Say --token-file, or set REFITD_TOKEN or REFITD_TOKEN_FILE.",
}


_MAY_ONLY_LOOK = (
    "The token that was sent may only look: say the --token-file, or set the REFITD_TOKEN, of the other one."
)
# The notice named a path beneath the root: the service has another root, or does not see the files yet.
_LOOKED_ELSEWHERE = frozenset({"path-missing", "path-outside-root"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a command failed."""

    code: ExitCode
    problem: Problem

    @property
    def hint(self) -> str | None:
        """What a person could try next."""
        return _MAY_ONLY_LOOK if self.problem.slug == "insufficient-scope" else _HINTS.get(self.code)


# The exit code, and the problem's slug, title and status, of each kind of error; the first that fits.
_EXITS: tuple[tuple[type[Exception], ExitCode, str, str, int], ...] = (
    (ServiceUnreachableError, ExitCode.UNREACHABLE, "service-unreachable", "The service cannot be reached", 503),
    (WaitTimeoutError, ExitCode.TIMED_OUT, "timed-out", "The time is up", 504),
    (VersionFailedError, ExitCode.FAILED, "version-failed", "The version will not be served", 409),
    (EngineFailedError, ExitCode.FAILED, "engine-failed", "Engines did not take the version", 502),
    (PublishError, ExitCode.FAILED, "publish-failed", "Nothing was published", 422),
    (RefitError, ExitCode.FAILED, "failed", "The command failed", 500),
    (OSError, ExitCode.FAILED, "io-error", "A file cannot be used", 500),
)


def failure_of(error: RefitError | ValueError | OSError) -> Failure:
    """Return the exit code and the problem of an error. A ValueError is about what the user typed."""
    if isinstance(error, ServiceProblemError):
        code = ExitCode.UNREACHABLE if error.problem.status == 503 else ExitCode.FAILED
        if isinstance(error, UnauthorizedError):
            code = ExitCode.UNAUTHORISED
        return Failure(code=code, problem=_with_what_stands(error))
    if not isinstance(error, PlanRefusedError):
        for kind, code, slug, title, status in _EXITS:
            if isinstance(error, kind):
                return Failure(code=code, problem=_problem(slug, title, status, str(error)))
    return usage(str(error))


def usage(sentence: str) -> Failure:
    """The failure of a command that was typed wrongly."""
    return Failure(code=ExitCode.USAGE, problem=_problem("usage", "This is not how the command is used", 400, sentence))


def _with_what_stands(error: ServiceProblemError) -> Problem:
    """The problem; of a version that was published all the same, also its path and whether the service will find it."""
    if (publication := error.publication) is None:
        return error.problem
    stands = f"{publication.version_id} is on disk at {publication.path} all the same"
    if error.problem.slug in _LOOKED_ELSEWHERE:
        finds = "where that is another folder the service never finds it: publish with the --root of 'refitd serve'"
    elif error.problem.slug == "run-followed":
        finds = "the service that watches that root brings no engine to it if it follows an upstream: delete it then"
    else:
        finds = "a service that watches that root finds it by itself"
    return replace(error.problem, detail=f"{error.problem.detail}; {stands}: {finds}")


def _problem(slug: str, title: str, status: int, detail: str) -> Problem:
    return Problem(type=f"urn:refitd:problem:{slug}", title=title, status=status, detail=detail)
