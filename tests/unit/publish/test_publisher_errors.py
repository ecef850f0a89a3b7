"""The errors: one tree, split by whose fault it is, whole after a journey between processes."""

import pickle
import re

import pytest

from refitd_client import errors
from refitd_client.contract.naming import InvalidNameError
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import EngineOnVersion, Problem

PROBLEM = Problem(type="urn:refitd:problem:conflict", title="Conflict", status=409, detail="other content for step 3")
ENGINE = EngineOnVersion(id="e1", state=EngineState.TAINTED, step=None)

EXAMPLES: list[errors.RefitError] = [
    errors.PublishError("text"),
    errors.InvalidWeightsError("text", tensor="w"),
    errors.NameRefusedError("text"),
    errors.StepConflictError("text"),
    errors.RunBusyError("text", pid=7, host="node"),
    errors.RankLostError("text", rank=3),
    errors.TransportRefusedError("text"),
    errors.StorageError("text"),
    errors.NoSpaceError("text", needed=2, free=1),
    errors.BucketError("text", may_heal=True),
    errors.VersionFailedError("text"),
    errors.VersionRejectedError("text"),
    errors.VersionLostError("text"),
    errors.EngineFailedError("text", engines=(ENGINE,)),
    errors.PlanRefusedError("text"),
    errors.WaitTimeoutError("text", laggards=(ENGINE,)),
    errors.UnlabelledAnswerError("text"),
    errors.ServiceError("text"),
    errors.ServiceUnreachableError("text"),
    errors.ServiceProblemError(PROBLEM),
    errors.UnauthorizedError(PROBLEM),
    errors.NotFoundError(PROBLEM),
    errors.ConflictError(PROBLEM),
    errors.InvalidRequestError(PROBLEM),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: errors.RefitError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    assert type(copy) is type(error)
    assert (str(copy), copy.fault, vars(copy)) == (str(error), error.fault, vars(error))


def test_the_examples_are_all_there_are() -> None:
    def below(kind: type[errors.RefitError]) -> set[type[errors.RefitError]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    here = {kind for kind in below(errors.RefitError) if kind.__module__ == errors.__name__}
    assert here - {errors.RefitError} == {type(error) for error in EXAMPLES}


def test_the_tree_in_the_documentation_is_the_tree() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+Error)", errors.__doc__ or "", re.MULTILINE)
    path: list[str] = []
    for prefix, name in drawn:
        depth = len(prefix) // 4
        path = [*path[:depth], name]
        if depth:
            assert getattr(errors, name).__bases__[0].__name__ == path[depth - 1]
    assert {name for _, name in drawn} == {type(error).__name__ for error in EXAMPLES} | {"RefitError"}


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(errors.ConflictError(PROBLEM)) == "Conflict: other content for step 3 (HTTP 409, conflict)"


@pytest.mark.parametrize(
    ("status", "kind", "fault"),
    [
        (400, errors.InvalidRequestError, errors.Fault.TRAINER),
        (401, errors.UnauthorizedError, errors.Fault.TRAINER),
        (403, errors.UnauthorizedError, errors.Fault.TRAINER),
        (404, errors.NotFoundError, errors.Fault.TRAINER),
        (409, errors.ConflictError, errors.Fault.TRAINER),
        (422, errors.InvalidRequestError, errors.Fault.TRAINER),
        (429, errors.ServiceProblemError, errors.Fault.SERVICE),
        (500, errors.ServiceProblemError, errors.Fault.SERVICE),
        (507, errors.ServiceProblemError, errors.Fault.SERVICE),
    ],
)
def test_a_problem_becomes_the_error_of_its_status(
    status: int, kind: type[errors.ServiceProblemError], fault: errors.Fault
) -> None:
    """What may pass by itself is not the trainer's fault."""
    error = errors.problem_error(Problem(type="urn:refitd:problem:x", title="X", status=status, detail="because"))
    assert type(error) is kind
    assert error.fault is fault


def test_a_refused_name_is_the_contracts_error_too() -> None:
    """Whoever checks names by the contract catches it."""
    assert issubclass(errors.NameRefusedError, InvalidNameError)
